"""Commands, by file. Heavy imports are in their functions."""
