"""What the variables of an integer program stand for: options of operators, placements of stored tensors and of what is
kept, and the uses between them."""

from dataclasses import dataclass, field

from torch import fx

from moe.sharding.placement import Placements
from moe.sharding.solve.costs import Choice


@dataclass(frozen=True, eq=False)
class Use:
    """A tensor as an operand."""

    tensor: fx.Node
    by: fx.Node
    operand: int
    count: int
    """Uses that are the same, of nodes of the same classes."""


@dataclass
class Variables:
    """By what they stand for."""

    options: dict[fx.Node, list[tuple[int, Choice]]] = field(default_factory=dict)
    """Of operators."""
    leaves: dict[fx.Node, list[tuple[int, Placements]]] = field(default_factory=dict)
    kept_tensors: dict[tuple[fx.Node, Placements], int] = field(default_factory=dict)
