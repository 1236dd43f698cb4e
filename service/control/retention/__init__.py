"""Retention: deletion, thinning of old events, full storage, and users' access to a job's files."""
