"""Assignments: where each tensor of a captured graph lies, and which option each operator has along each mesh axis."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moe.sharding.placement import Placements
from moe.sharding.rules.rule import Options


@dataclass(frozen=True)
class Assignment:
    """A choice for every node of a graph, by its name."""

    degrees: tuple[int, ...]
    leaves: Mapping[str, Placements]
    """Of parameters, buffers and constants; inputs and tangents lie whole on every rank."""
    options: Mapping[str, Options]
    kept_tensors: frozenset[tuple[str, Placements]] = field(default_factory=frozenset)
    """Tensors of the forward pass, each with a placement in which it was used there and is kept for the backward pass,
    in place of that in which it was made."""
