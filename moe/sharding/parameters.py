"""What a parameter of an applied module knows of its place. It is of torch's own type: optimizers take up to twice as
long over a subclass."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

APPLIED: WeakSet[nn.Module] = WeakSet()
"""All applied modules that there are: torch's own norms of their gradients would be those of this rank's parts."""

_NAME = "place_on_mesh"


@dataclass(frozen=True, eq=False)
class Place:
    """A parameter as this rank's part of another."""

    applied: Any
    """The module that it belongs to."""
    is_first: bool
    """Whether this rank is the first of those that have this part."""
    is_cut: bool
    """Whether other ranks have other parts."""


def note_place(parameter: nn.Parameter, place: Place) -> None:
    setattr(parameter, _NAME, place)


def place_of(tensor: Tensor) -> Place | None:
    """None for what is no parameter of an applied module."""
    return getattr(tensor, _NAME, None)


def is_cut(tensor: Tensor) -> bool:
    place = place_of(tensor)
    return place is not None and place.is_cut
