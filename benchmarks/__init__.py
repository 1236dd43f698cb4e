"""Measurements. Each module prints a table and writes `results/NAME.json`, with machine and versions beside it."""
