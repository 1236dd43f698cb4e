"""Processes on the cluster: a driver a job, its workers, and what they record."""
