"""Chunks in which linear attention computes."""

CHUNK = 64
"""Positions whose state updates are computed together."""
POSITIONS_AT_ONCE = 16 * CHUNK
"""Positions of a row whose chunks are in memory at the same time."""
