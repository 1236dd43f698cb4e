"""Retention: what is deleted, thinned out or refused once storage or a database is full, and the files of a job."""
