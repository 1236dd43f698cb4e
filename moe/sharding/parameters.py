"""Applied modules, known to what has to tell them from others."""

from weakref import WeakSet

from torch import nn

APPLIED: WeakSet[nn.Module] = WeakSet()
"""All applied modules that there are."""
