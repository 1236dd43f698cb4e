"""Gloo ranks that stay up between tests."""

from tests.parity.conftest import ranks

__all__ = ["ranks"]
