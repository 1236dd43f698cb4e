"""Hints: what a user says of where tensors lie, by name or in `forward`, and parts that are partitioned by hand."""
