"""Hints: placements that a user requests by name or in `forward`, and parts that are partitioned by hand."""
