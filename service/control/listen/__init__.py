"""Connections: their number, their timeouts, and rate limits on what they cause in the log."""
