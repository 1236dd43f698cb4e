"""Sweeps: families of jobs, started, compared and stopped by a pure policy."""
