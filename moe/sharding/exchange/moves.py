"""The cheapest collectives between two placements of a tensor. No torch."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from moe.plan.cluster.cluster import Cluster
from moe.plan.cost.collectives import Network, Ranks
from moe.sharding.placement import WHOLE, AxisPlacement, Placements, axes_of, part_bytes

Kind = Literal["gather", "slice", "all_to_all", "all_reduce", "reduce_scatter", "keep_first"]

BUCKET_BYTES = 1 << 22
"""Exchanges that wait for each other go out together until there are so many bytes: what latency then adds is
little."""


@dataclass(frozen=True)
class Move:
    """A change of placement along one axis: one collective, or something done on each rank by itself."""

    kind: Kind
    axis: int
    before: AxisPlacement
    after: AxisPlacement


class Moves:
    """Finds the cheapest moves on a mesh of a cluster, whose last axis joins consecutive ranks.

    Where axis 0 is a loop over micro-batches, that axis is only entered and left: on each rank by itself, and for
    nothing. Whatever is moved along other axes inside the loop is moved once a micro-batch.
    """

    def __init__(self, cluster: Cluster, degrees: Sequence[int], is_loop: bool = False) -> None:
        self._network, self._memory = Network(cluster), cluster.traits.memory_bytes_per_s
        self._degrees, self._is_loop = tuple(degrees), is_loop
        self._ranks = [
            Ranks(degree, math.prod(self._degrees[axis + 1 :])) for axis, degree in enumerate(degrees)
        ]
        self._cheapest = cache(self._searched)

    def cheapest(
        self,
        shape: Sequence[int],
        itemsize: int,
        source: Placements,
        target: Placements,
        *,
        bucketed: bool = False,
    ) -> tuple[float, tuple[Move, ...]]:
        """(seconds, moves one after the other) from one placement to another, by Dijkstra's algorithm over what one
        move reaches; of equally cheap ones the same each time. `bucketed`: of a tensor that travels with others, which
        share the latency of one collective.

        Raises ValueError where partial results of one kind lie across those of another: they can be combined in no
        order.
        """
        for given in (source, target):
            if _mixes(given):
                raise ValueError(f"partial results of two kinds at once: {', '.join(map(str, given))}")
        return self._cheapest(tuple(shape), itemsize, source, target, bucketed)

    def _searched(
        self, shape: tuple[int, ...], itemsize: int, source: Placements, target: Placements, bucketed: bool
    ) -> tuple[float, tuple[Move, ...]]:
        found: set[Placements] = set()
        waiting: list[tuple[float, int, int, Placements, tuple[Move, ...]]] = [(0.0, 0, 0, source, ())]
        number = 0
        while waiting:
            cost, _, _, here, moves = heapq.heappop(waiting)
            if here == target:
                return cost, moves
            if here in found:
                continue
            found.add(here)
            for move in _possible(here, source, target):
                if self._is_loop and move.axis == 0 and move.after != target[0]:
                    continue
                there = (*here[: move.axis], move.after, *here[move.axis + 1 :])
                if there not in found and not _mixes(there):
                    number += 1
                    added = self._seconds(move, shape, itemsize, here, there, bucketed)
                    heapq.heappush(waiting, (cost + added, len(moves) + 1, number, there, (*moves, move)))
        raise AssertionError(f"no way from {source} to {target}")

    def _seconds(
        self,
        move: Move,
        shape: Sequence[int],
        itemsize: int,
        here: Placements,
        there: Placements,
        bucketed: bool,
    ) -> float:
        """Seconds on the links, and in memory for what is read and written."""
        if self._is_loop and move.axis == 0:
            return 0.0
        times = self._degrees[0] if self._is_loop and here[0] != WHOLE else 1
        before = part_bytes(shape, itemsize, here, self._degrees)
        after = part_bytes(shape, itemsize, there, self._degrees)
        ranks, local = self._ranks[move.axis], (before + after) / self._memory

        def of(collective: Callable[[float, Ranks], float], num_bytes: int) -> float:
            seconds = collective(num_bytes, ranks)
            if bucketed and num_bytes < BUCKET_BYTES:
                seconds -= collective(0, ranks) * (1 - num_bytes / BUCKET_BYTES)
            return times * (local + seconds)

        match move.kind:
            case "gather":
                return of(self._network.gather, after)
            case "reduce_scatter":
                return of(self._network.gather, before)
            case "all_reduce":
                return of(self._network.all_reduce, before)
            case "all_to_all":
                return times * (local + self._network.all_to_all(before, ranks))
            case _:
                return times * local


def _mixes(placements: Placements) -> bool:
    """Whether partial results of one kind lie across those of another."""
    return len({each.combine for each in placements if each.combine is not None}) > 1


def _possible(here: Placements, source: Placements, target: Placements) -> Iterator[Move]:
    """Moves along one axis. A split of a dimension begins and ends only where no axis further in splits it too: parts
    are cut from the outermost axis inwards."""
    dims = sorted({each.dim for each in (*source, *target) if each.dim is not None})
    for axis, before in enumerate(here):
        ends = before.dim is None or axes_of(here, before.dim)[-1] == axis
        splits = [
            AxisPlacement(dim=dim)
            for dim in dims
            if dim != before.dim and all(each < axis for each in axes_of(here, dim))
        ]
        if before.dim is not None:
            if ends:
                yield Move("gather", axis, before, WHOLE)
                yield from (Move("all_to_all", axis, before, after) for after in splits)
        elif before.combine is not None:
            yield Move("all_reduce", axis, before, WHOLE)
            if before.combine == "sum":
                yield from (Move("reduce_scatter", axis, before, after) for after in splits)
        else:
            yield from (Move("slice", axis, before, after) for after in splits)
            if target[axis].combine is not None:
                yield Move("keep_first", axis, before, target[axis])
