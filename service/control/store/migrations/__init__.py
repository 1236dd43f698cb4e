"""Migrations of the tables from each release to the next."""
