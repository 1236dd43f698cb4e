"""Models out of a run: put to use from a committed checkpoint, and as files that other tools read."""
