"""Reports of runs: records in, history and streams out."""
