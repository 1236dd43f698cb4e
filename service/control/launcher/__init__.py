"""The cluster that runs jobs: the `Launcher` interface, and its implementation for Ray."""
