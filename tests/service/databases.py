"""Tests that run on both kinds of databases."""

import pytest

BOTH_DATABASES = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True, scope="module")
"""Mark of tests whose `plane`, `own_plane` or `database` is on SQLite, then on PostgreSQL."""
