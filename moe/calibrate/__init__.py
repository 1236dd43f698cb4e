"""Measurements of a machine: rates of devices and links, and steps under plans."""
