"""Data, from users' files to batches: what every kind of data has here, and a folder for each kind."""
