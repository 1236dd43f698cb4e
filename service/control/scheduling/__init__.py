"""Scheduling: policies decide a job's next step, the controller carries it out."""
