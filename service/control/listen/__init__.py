"""Connections: limits on their number, times and log lines."""
