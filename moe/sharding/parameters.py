"""Registry of applied modules."""

from weakref import WeakSet

from torch import nn

APPLIED: WeakSet[nn.Module] = WeakSet()
"""All applied modules that there are."""
