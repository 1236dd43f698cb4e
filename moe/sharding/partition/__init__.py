"""Partition: a plan made into one local program for every rank (GShard, arXiv 2006.16668, section 3.3)."""
