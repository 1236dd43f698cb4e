"""Meaning of the variables of an integer program: options of operators, placements of parameters and buffers,
placements of tensors saved for the backward pass; and the uses of tensors that connect them."""

from dataclasses import dataclass, field

from torch import fx

from moe.sharding.placement import Placements
from moe.sharding.solve.costs import Choice


@dataclass(frozen=True, eq=False)
class Use:
    """A use of a tensor as an operand of an operator."""

    tensor: fx.Node
    user: fx.Node
    operand: int
    count: int
    """Number of such uses among nodes of the same two classes."""


@dataclass
class Variables:
    """Variables, each with its meaning."""

    options: dict[fx.Node, list[tuple[int, Choice]]] = field(default_factory=dict)
    """Variables of each operator, one for each option."""
    leaves: dict[fx.Node, list[tuple[int, Placements]]] = field(default_factory=dict)
    kept_tensors: dict[tuple[fx.Node, Placements], int] = field(default_factory=dict)
