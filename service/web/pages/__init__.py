"""A file for each page."""
