"""Operators that a capture decomposes into simpler ones, so that these have no sharding rules."""
