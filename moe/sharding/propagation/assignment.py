"""Assignments: the placement of each tensor of a captured graph, and the option of each operator along each mesh
axis."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moe.sharding.placement import Placements
from moe.sharding.rules.rule import Options


@dataclass(frozen=True)
class Assignment:
    """A choice for every node of a graph, by its name."""

    degrees: tuple[int, ...]
    leaves: Mapping[str, Placements]
    """Placements of parameters, buffers and constants. Inputs and tangents are whole on every rank."""
    options: Mapping[str, Options]
    kept_tensors: frozenset[tuple[str, Placements]] = field(default_factory=frozenset)
    """Tensors of the forward pass that are saved for the backward pass in a placement in which they were used, instead
    of the one in which they were computed."""
