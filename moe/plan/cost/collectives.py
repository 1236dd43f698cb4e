"""Seconds of collectives, by the links that their ranks are joined with."""

import math
from dataclasses import dataclass
from functools import cache

from moe.plan.cluster.cluster import Cluster


@dataclass(frozen=True)
class Ranks:
    """Ranks of one group: `count` of them, `stride` apart."""

    count: int
    stride: int = 1


class Network:
    """Seconds of collectives on a cluster. Ranks are numbered node by node."""

    def __init__(self, cluster: Cluster) -> None:
        self._levels, self._rails, self._sides = cluster.levels, cluster.rails, cluster.sides
        self.all_to_all = cache(self._all_to_all)
        self.gather = cache(self._gather)

    def all_reduce(self, num_bytes: float, ranks: Ranks) -> float:
        """A sum of `num_bytes` on each rank: a reduce-scatter and an all-gather, or a tree where its fewer steps count
        for more, `α log2(n)` each way."""
        steps_s, bytes_s = self._ring(num_bytes, ranks)
        return 2 * (min(steps_s, self._tree_s(ranks)) + bytes_s)

    def _gather(self, num_bytes: float, ranks: Ranks) -> float:
        """An all-gather to, or a reduce-scatter of, `num_bytes` on each rank, by a ring."""
        steps_s, bytes_s = self._ring(num_bytes, ranks)
        return steps_s + bytes_s

    def _ring(self, num_bytes: float, ranks: Ranks) -> tuple[float, float]:
        """(latency of its steps, seconds that bytes take).

        A ring passes all but a rank's own share through each of its links, in n - 1 steps one after the other:
        `α (n - 1) + B (n - 1) / (n · bandwidth)`. Bytes wait for the slowest level; of the steps, as many leave a
        node as there are nodes but one (NCCL's own model of its rings). Ranks of a group in a node share its ways out.
        """
        if ranks.count == 1:
            return 0.0, 0.0
        if self._sides is not None:  # four links a device, in both directions of two rings
            link, hops = self._levels[0], _root(ranks.count)
            return link.latency_s * hops, num_bytes * (ranks.count - 1) / ranks.count / (4 * link.bytes_per_s)
        slowest, latency, inside = 0.0, 0.0, 1
        for link, joined in zip(self._levels, self._reached(ranks), strict=True):
            groups = -(-joined // inside)
            if groups > 1:
                moved = num_bytes * (groups - 1) / groups
                ways = min(inside, joined - inside * (groups - 1))  # out of the group that has the fewest
                slowest = max(slowest, moved / (ways * link.bytes_per_s))
                latency += link.latency_s * (-(-ranks.count // inside) - -(-ranks.count // joined))
            inside = max(inside, joined)
        return latency, slowest

    def _tree_s(self, ranks: Ranks) -> float:
        """Latency of the steps from the leaves of a tree to its root. There is none on a torus, whose rings have its
        sides for their steps."""
        if self._sides is not None:
            return math.inf
        latency, inside = 0.0, 1
        for link, joined in zip(self._levels, self._reached(ranks), strict=True):
            latency += link.latency_s * _log2(-(-joined // inside))
            inside = max(inside, joined)
        return latency

    def _all_to_all(self, num_bytes: float, ranks: Ranks, copies: float = 1.0) -> float:
        """An exchange of `num_bytes` from each rank, an equal share for each other one.

        What stays within a level and what leaves it are on their ways at once: the slowest decides. `copies` divides
        what crosses the outermost level that the group spans, and is spread again within: hierarchical dispatch sends a
        token to each node once. On a torus half of all bytes cross its middle, over twice its shorter side of links:
        `B √D / 8` of a link's time.
        """
        if ranks.count == 1:
            return 0.0
        if self._sides is not None:
            link, side = self._levels[0], _root(ranks.count)
            return link.latency_s * side + num_bytes * side / 8 / link.bytes_per_s
        reached = self._reached(ranks)
        outermost = next(index for index, joined in enumerate(reached) if joined == ranks.count)
        slowest, latency, inside, spread = 0.0, 0.0, 1, 0.0
        for index, link in enumerate(self._levels[: outermost + 1]):
            moved = num_bytes * (reached[index] - inside) / ranks.count
            if index == outermost and outermost > 0:
                if copies > 1:
                    spread = num_bytes * (reached[index] - inside) / ranks.count
                    moved /= copies
                elif self._rails:  # first to the device whose rail it travels on
                    spread = moved * (inside - 1) / inside
            if reached[index] > inside:
                slowest = max(slowest, moved / link.bytes_per_s)
                latency += link.latency_s * _log2(reached[index])
            inside = max(inside, reached[index])
        if spread:
            latency += spread / self._levels[0].bytes_per_s + self._levels[0].latency_s
        return latency + slowest

    def _reached(self, ranks: Ranks) -> list[int]:
        """Ranks that each level joins; the last joins all, also where workers share devices."""
        within = [min(ranks.count, max(1, link.devices // ranks.stride)) for link in self._levels[:-1]]
        return [*within, ranks.count]

    def send(self, num_bytes: float, stride: int) -> float:
        """From one rank to the one `stride` further on."""
        link = next((link for link in self._levels if link.devices > stride), self._levels[-1])
        return link.latency_s + num_bytes / link.bytes_per_s

    def nodes_of(self, ranks: Ranks) -> int:
        """Groups of the innermost level that the ranks span."""
        return max(1, ranks.count * ranks.stride // self._levels[0].devices)


def _log2(count: int) -> int:
    """Rounded up."""
    return (count - 1).bit_length()


def _root(count: int) -> float:
    return float(count**0.5)
