"""Scheduling: policies decide a job's next step, and the controller carries it out."""
