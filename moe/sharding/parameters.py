"""Parameters of applied modules as parts of whole ones. They are of torch's own type: optimizers take up to twice as
long over a subclass."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

APPLIED: WeakSet[nn.Module] = WeakSet()
"""All applied modules that there are: torch's own norms of their gradients would be those of this rank's parts."""

_NAME = "part_of_a_whole"


@dataclass(frozen=True, eq=False)
class ParameterPart:
    """Notes on a parameter that is this rank's part of a whole one."""

    applied: Any
    """The module that it belongs to."""
    is_first: bool
    """Whether this rank is the first of those that have this part."""
    is_cut: bool
    """Whether other ranks have other parts."""


def note_part(parameter: nn.Parameter, part: ParameterPart) -> None:
    setattr(parameter, _NAME, part)


def noted_part(tensor: Tensor) -> ParameterPart | None:
    """None for what is no parameter of an applied module."""
    return getattr(tensor, _NAME, None)


def is_cut(tensor: Tensor) -> bool:
    part = noted_part(tensor)
    return part is not None and part.is_cut
