"""Reports from a run: records in, history and streams out."""
