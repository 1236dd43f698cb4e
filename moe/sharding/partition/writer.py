"""Writer of a local program: a graph whose arguments are the mesh and a list of tensors. The program empties the list,
so that no tensor lives longer than it is used."""

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from moe.sharding.exchange import exchange
from moe.sharding.exchange.moves import Moves, PlacementMove
from moe.sharding.partition import runtime
from moe.sharding.placement import Placements, part_bytes, part_shape


def identity(combine: str, dtype: torch.dtype) -> float | int | bool:
    """Identity element of a sum, maximum or minimum in a dtype."""
    if combine == "sum":
        return False if dtype == torch.bool else 0
    if dtype == torch.bool or dtype.is_complex:  # whether any element, or every one, is nonzero
        return combine == "min"
    if dtype.is_floating_point:
        return float("-inf") if combine == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if combine == "max" else info.max


def moved_bytes(node: fx.Node, degrees: Sequence[int]) -> int:
    """Bytes that a rank sends in the exchange of a node; of a gather, those that it receives."""
    move, shape, itemsize, _, before, after = node.meta["move"]
    return part_bytes(shape, itemsize, after if move.kind == "gather" else before, degrees)


class ProgramWriter:
    """Writes the program of one pass. Each version of a tensor (its part with certain placements) is computed once."""

    def __init__(self, degrees: Sequence[int], moves: Moves) -> None:
        self.degrees, self._moves = tuple(degrees), moves
        self.graph = fx.Graph()
        self.mesh = self.graph.placeholder("mesh")
        self._list = self.graph.placeholder("tensors")
        self._clear: fx.Node | None = None
        self.num_arguments = 0
        self.versions: dict[fx.Node, dict[Placements, fx.Node]] = {}
        """Versions by tensor of the captured graph and placements."""
        self._pending: dict[tuple[fx.Node, Placements], fx.Node] = {}
        self._numbers: dict[tuple[Any, ...], fx.Node] = {}
        self.origin: dict[str, Any] = {}
        """Meta of the nodes that are written: the user's line, and the module."""

    def argument(self) -> fx.Node:
        """Add a node for the next tensor of the list."""
        if self._clear is None:
            self._clear = self.graph.call_method("clear", (self._list,))
        with self.graph.inserting_before(self._clear):
            node = self.graph.call_function(getitem, (self._list, self.num_arguments))
        self.num_arguments += 1
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.origin)
        return node

    def attribute(self, name: str) -> fx.Node:
        return self.graph.get_attr(name)

    def first(self, size: int, axes: tuple[int, ...]) -> fx.Node | int:
        return self._number(runtime.first, size, axes) if axes else 0

    def valid(self, size: int, axes: tuple[int, ...]) -> fx.Node | int:
        return self._number(runtime.valid, size, axes) if axes else size

    def mask_padding(
        self, part: fx.Node, dim: int, size: int, axes: tuple[int, ...], value: float | int | bool
    ) -> fx.Node:
        return self.call(runtime.mask, part, dim, self._number(runtime.valid, size, axes), value)

    def _number(self, function: Any, size: int, axes: tuple[int, ...]) -> fx.Node:
        key = (function, size, axes)
        if key not in self._numbers:
            self._numbers[key] = self.graph.call_function(function, (self.mesh, size, axes))
        return self._numbers[key]

    def is_padded(self, size: int, axes: Sequence[int]) -> bool:
        """Whether some rank's part has padding."""
        for axis in axes:
            if size % self.degrees[axis]:
                return True
            size //= self.degrees[axis]
        return False

    def add(self, tensor: fx.Node, placements: Placements, part: fx.Node) -> None:
        """Register a version of a tensor."""
        part.meta["whole"] = tuple(tensor.meta["val"].shape)
        self.versions.setdefault(tensor, {})[placements] = part

    def obtain(self, tensor: fx.Node, placements: Placements) -> fx.Node:
        """The version of a tensor with these placements, by the cheapest moves from an existing version."""
        versions = self.versions[tensor]
        if placements in versions:
            return versions[placements]
        current, moves = self._way(tensor, placements)
        part = versions[current]
        for move in moves:
            previous = current
            current = (*current[: move.axis], move.after, *current[move.axis + 1 :])
            if current in versions:
                part = versions[current]
            elif (pending := self._pending.pop((tensor, current), None)) is not None:
                part = self.call(exchange.finish, pending)
                self.add(tensor, current, part)
            else:
                function, *arguments = self._exchange(tensor, move, current)
                part = self.call(function, self.mesh, part, *arguments)
                self.add(tensor, current, part)
                part.meta["move"] = self._describe_move(tensor, move, previous, current)
        return part

    def begin(self, tensor: fx.Node, placements: Placements) -> None:
        """Start the first move of a tensor to these placements, if it is a collective that can overlap with
        arithmetic."""
        versions = self.versions[tensor]
        source, moves = self._way(tensor, placements)
        for move in moves[:1]:
            target = (*source[: move.axis], move.after, *source[move.axis + 1 :])
            function, *arguments = self._exchange(tensor, move, target)
            if (
                function in exchange.BEGIN_FUNCTIONS
                and target not in versions
                and (tensor, target) not in self._pending
            ):
                pending = self.call(exchange.BEGIN_FUNCTIONS[function], self.mesh, versions[source], *arguments)
                pending.meta["move"] = self._describe_move(tensor, move, source, target)
                self._pending[tensor, target] = pending

    def _way(self, tensor: fx.Node, placements: Placements) -> tuple[Placements, tuple[PlacementMove, ...]]:
        """(existing version from which moves are cheapest, these moves)."""
        versions = self.versions[tensor]
        if placements in versions:
            return placements, ()
        fake = tensor.meta["val"]
        shape, itemsize = tuple(fake.shape), fake.dtype.itemsize
        ways = [(*self._moves.cheapest(shape, itemsize, source, placements), source) for source in versions]
        _, moves, nearest = min(ways, key=lambda way: way[0])
        return nearest, moves

    def _exchange(self, tensor: fx.Node, move: PlacementMove, target: Placements) -> tuple[Any, ...]:
        return exchange.call_of(move, part_shape(tuple(tensor.meta["val"].shape), target, self.degrees))

    def _describe_move(
        self, tensor: fx.Node, move: PlacementMove, before: Placements, after: Placements
    ) -> tuple[Any, ...]:
        fake = tensor.meta["val"]
        return move, tuple(fake.shape), fake.dtype.itemsize, tensor.name, before, after
