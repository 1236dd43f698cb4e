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
"""Size up to which exchanges share one collective. Beyond it, latency adds little."""


@dataclass(frozen=True)
class PlacementMove:
    """A change of placement along one axis: one collective, or a local operation on each rank."""

    kind: Kind
    axis: int
    before: AxisPlacement
    after: AxisPlacement


class Moves:
    """Finds the cheapest moves on a mesh of a cluster, whose last axis joins consecutive ranks.

    If axis 0 is a loop over micro-batches, moves along it are local and cost nothing. Tensors that are moved along
    other axes inside the loop are moved once per micro-batch.
    """

    def __init__(self, cluster: Cluster, degrees: Sequence[int], is_loop: bool = False) -> None:
        self._network, self._memory = Network(cluster), cluster.calibrated_device.memory_bytes_per_s
        self._degrees, self._is_loop = tuple(degrees), is_loop
        self._ranks = [Ranks(degree, math.prod(self._degrees[axis + 1 :])) for axis, degree in enumerate(degrees)]
        self._cheapest = cache(self._search)

    def cheapest(
        self, shape: Sequence[int], itemsize: int, source: Placements, target: Placements, *, is_bucketed: bool = False
    ) -> tuple[float, tuple[PlacementMove, ...]]:
        """(seconds, sequence of moves) from one placement to another, by Dijkstra's algorithm; of equally cheap
        sequences the same one each time. `is_bucketed` is for a tensor that shares collectives, and their latency, with
        others.

        Raises ValueError for placements with partial results of two kinds: the order of combination would matter.
        """
        for placements in (source, target):
            if _mixes(placements):
                raise ValueError(f"partial results of two kinds: {', '.join(map(str, placements))}")
        return self._cheapest(tuple(shape), itemsize, source, target, is_bucketed)

    def _search(
        self, shape: tuple[int, ...], itemsize: int, source: Placements, target: Placements, is_bucketed: bool
    ) -> tuple[float, tuple[PlacementMove, ...]]:
        closed_set: set[Placements] = set()
        waiting: list[tuple[float, int, int, Placements, tuple[PlacementMove, ...]]] = [(0.0, 0, 0, source, ())]
        number = 0
        while waiting:
            cost, _, _, placements, moves = heapq.heappop(waiting)
            if placements == target:
                return cost, moves
            if placements in closed_set:
                continue
            closed_set.add(placements)
            for move in _possible(placements, source, target):
                if self._is_loop and move.axis == 0 and move.after != target[0]:
                    continue
                next_placements = (*placements[: move.axis], move.after, *placements[move.axis + 1 :])
                if next_placements not in closed_set and not _mixes(next_placements):
                    number += 1
                    move_s = self._seconds(move, shape, itemsize, placements, next_placements, is_bucketed)
                    heapq.heappush(waiting, (cost + move_s, len(moves) + 1, number, next_placements, (*moves, move)))
        raise AssertionError(f"no conversion from {source} to {target}")

    def _seconds(
        self,
        move: PlacementMove,
        shape: Sequence[int],
        itemsize: int,
        source: Placements,
        target: Placements,
        is_bucketed: bool,
    ) -> float:
        """Seconds on the links, and of memory access for what is read and written."""
        if self._is_loop and move.axis == 0:
            return 0.0
        times = self._degrees[0] if self._is_loop and source[0] != WHOLE else 1
        before = part_bytes(shape, itemsize, source, self._degrees)
        after = part_bytes(shape, itemsize, target, self._degrees)
        ranks, local = self._ranks[move.axis], (before + after) / self._memory

        def collective_seconds(collective: Callable[[float, Ranks], float], num_bytes: int) -> float:
            seconds = collective(num_bytes, ranks)
            if is_bucketed and num_bytes < BUCKET_BYTES:
                seconds -= collective(0, ranks) * (1 - num_bytes / BUCKET_BYTES)
            return times * (local + seconds)

        match move.kind:
            case "gather":
                return collective_seconds(self._network.gather, after)
            case "reduce_scatter":
                return collective_seconds(self._network.gather, before)
            case "all_reduce":
                return collective_seconds(self._network.all_reduce, before)
            case "all_to_all":
                return times * (local + self._network.all_to_all(before, ranks))
            case _:
                return times * local


def _mixes(placements: Placements) -> bool:
    """Whether placements have partial results of two kinds."""
    return len({placement.combine for placement in placements if placement.combine is not None}) > 1


def _possible(placements: Placements, source: Placements, target: Placements) -> Iterator[PlacementMove]:
    """Moves along one axis. A dimension can be split or gathered along an axis only if no inner axis splits it, too:
    parts are cut from the outermost axis inwards."""
    dims = sorted({placement.dim for placement in (*source, *target) if placement.dim is not None})
    for axis, before in enumerate(placements):
        ends = before.dim is None or axes_of(placements, before.dim)[-1] == axis
        splits = [
            AxisPlacement(dim=dim)
            for dim in dims
            if dim != before.dim and all(split_axis < axis for split_axis in axes_of(placements, dim))
        ]
        if before.dim is not None:
            if ends:
                yield PlacementMove("gather", axis, before, WHOLE)
                yield from (PlacementMove("all_to_all", axis, before, after) for after in splits)
        elif before.combine is not None:
            yield PlacementMove("all_reduce", axis, before, WHOLE)
            if before.combine == "sum":
                yield from (PlacementMove("reduce_scatter", axis, before, after) for after in splits)
        else:
            yield from (PlacementMove("slice", axis, before, after) for after in splits)
            if target[axis].combine is not None:
                yield PlacementMove("keep_first", axis, before, target[axis])
