"""Places of an integer program's variables: operators, stored tensors, and what is kept, with the uses between them."""

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


@dataclass
class Sites:
    """Where variables stand."""

    options: dict[fx.Node, list[tuple[int, Choice]]] = field(default_factory=dict)
    """Of operators."""
    leaves: dict[fx.Node, list[tuple[int, Placements]]] = field(default_factory=dict)
    kept: dict[tuple[fx.Node, Placements], int] = field(default_factory=dict)
