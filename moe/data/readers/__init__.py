"""Readers of users' files, one for each kind of file. All yield the same records for the same data."""
