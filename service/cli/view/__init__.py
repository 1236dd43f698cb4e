"""What the command line shows: jobs, progress, reports."""
