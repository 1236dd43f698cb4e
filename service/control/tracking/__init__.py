"""Writes jobs' stored records to experiment trackers."""
