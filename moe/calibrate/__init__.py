"""Measurements of a machine: compute and link rates, and step times under plans."""
