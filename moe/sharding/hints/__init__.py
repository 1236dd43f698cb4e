"""Hints: placements that a user requests by name or in `forward`, and manually partitioned parts."""
