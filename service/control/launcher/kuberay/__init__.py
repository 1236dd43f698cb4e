"""Launcher of a RayJob with a RayCluster of its own for each attempt, through KubeRay."""
