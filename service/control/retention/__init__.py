"""Retention: deletion, thinning, full storage, and access to jobs' files."""
