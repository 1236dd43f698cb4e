"""A node for recorders: its temporary folder, where they spool, is the test's own."""

from tests.node import node

__all__ = ["node"]
