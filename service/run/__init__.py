"""Processes on the cluster: drivers and workers, and their records."""
