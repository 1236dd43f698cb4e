"""Views of the command line: jobs, progress, reports."""
