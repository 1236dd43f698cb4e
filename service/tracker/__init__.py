"""Process that writes jobs' records to experiment trackers."""
