"""Data, from users' files to batches: shared code here, and a folder for each kind of data."""
