"""Scheduling: policies decide what happens to a job next, and the controller acts."""
