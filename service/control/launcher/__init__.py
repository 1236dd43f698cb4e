"""Clusters that run jobs: the `Launcher` interface, implemented for Ray."""
