"""Measurements. Each module prints a table and writes `results/NAME.json`, with the machine and versions."""
