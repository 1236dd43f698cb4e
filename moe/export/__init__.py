"""Export of trained models: loading from a committed checkpoint, and files that other tools read."""
