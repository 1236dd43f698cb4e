"""Cluster that jobs run on: the `Launcher` that the control plane sees, and the Ray cluster behind it."""
