"""Parts of parameters: plain tensors in all that torch does with them."""

from typing import Any

from torch import nn

from moe.sharding import torch_private


class PartOfParameter(nn.Parameter):
    """This rank's part of a parameter."""

    applied: Any = None
    """The module that it belongs to."""
    is_first: bool = True
    """Whether this rank is the first of those that have this part."""
    is_cut: bool = False
    """Whether other ranks have other parts."""


torch_private.allow_foreach(PartOfParameter)
