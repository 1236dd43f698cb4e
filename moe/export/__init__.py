"""Models out of a run: for now, translating with a committed checkpoint."""
