"""Models out of a run: translating with a committed checkpoint, and files that other tools read."""
