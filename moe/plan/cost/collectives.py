"""Time of collectives, from the links between ranks."""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from moe.plan.cluster.cluster import Cluster
from moe.plan.cluster.kernels import ExchangeCost
from moe.spec import MoESpec


@dataclass(frozen=True)
class Ranks:
    """Process group of `count` ranks, `stride` untied."""

    count: int
    stride: int = 1


class _Ring(NamedTuple):
    """Time components of a ring collective."""

    startup_s: float = 0.0
    steps_s: float = 0.0
    """Latency of the sequential steps."""
    bytes_s: float = 0.0
    own_s: float = 0.0


class Network:
    """Time of collectives on a cluster with ranks numbered node by node."""

    def __init__(self, cluster: Cluster) -> None:
        self._levels, self._rails, self._sides = cluster.levels, cluster.rails, cluster.sides
        self._per_node, self._has_measured_nodes = cluster.devices_per_node, self._levels[0].is_measured
        self.exchange = cluster.exchange
        self.all_to_all = cache(self._all_to_all)
        self.gather = cache(self._gather)

    def all_reduce(self, num_bytes: float, ranks: Ranks) -> float:
        """All-reduce of `num_bytes` per rank: ring reduce-scatter and all-gather, or a tree (`α log2(n)` each way)
        if its latency is lower. Measured links within nodes are rings only."""
        ring = self._ring(num_bytes, ranks)
        in_node = Ranks(self._ranks_per_level(ranks)[0], ranks.stride) if self._has_measured_nodes else Ranks(1)
        in_node_s = self._ring(0.0, in_node).steps_s
        steps_s = in_node_s + min(ring.steps_s - in_node_s, self._tree_s(ranks) - self._tree_s(in_node))
        return ring.startup_s + 2 * (steps_s + ring.bytes_s) + ring.own_s

    def _gather(self, num_bytes: float, ranks: Ranks) -> float:
        """Ring all-gather to, or reduce-scatter of, `num_bytes` per rank."""
        ring = self._ring(num_bytes, ranks)
        return ring.startup_s + ring.steps_s + ring.bytes_s + ring.own_s

    def _ring(self, num_bytes: float, ranks: Ranks) -> _Ring:
        """Time of a ring: n - 1 sequential steps pass all but a rank's own share through each link, `α (n - 1) + B (n
        - 1) / (n · bandwidth)`.

        The slowest level bounds bandwidth; over n nodes, n - 1 steps cross nodes (NCCL's model). A group's ranks in a
        node share its outgoing links.
        """
        if ranks.count == 1:
            return _Ring()
        if self._sides is not None:  # four links per device: both directions of two rings
            link, hops = self._levels[0].ring, _root(ranks.count)
            moved_bytes = num_bytes * (ranks.count - 1) / ranks.count
            return _Ring(steps_s=link.step_s * hops, bytes_s=moved_bytes / (4 * link.bytes_per_s))
        slowest, latency, inside, innermost = 0.0, 0.0, 1, None
        for level, reach in zip(self._levels, self._ranks_per_level(ranks), strict=True):
            link, groups = level.ring, -(-reach // inside)
            if groups > 1:
                innermost = innermost or link
                moved_bytes = num_bytes * (groups - 1) / groups
                ways = min(inside, reach - inside * (groups - 1))  # outgoing links of the smallest group
                slowest = max(slowest, moved_bytes / (ways * link.bytes_per_s))
                latency += link.step_s * (-(-ranks.count // inside) - -(-ranks.count // reach))
            inside = max(inside, reach)
        assert innermost is not None
        own_s = num_bytes / ranks.count / innermost.own_bytes_per_s
        return _Ring(innermost.startup_s(num_bytes), latency, slowest, own_s)

    def _tree_s(self, ranks: Ranks) -> float:
        """Latency from the leaves of a tree to its root; infinite on a torus, whose rings take as many steps as its
        side."""
        if self._sides is not None:
            return math.inf
        latency, inside = 0.0, 1
        for level, reach in zip(self._levels, self._ranks_per_level(ranks), strict=True):
            latency += level.ring.step_s * (-(-reach // inside) - 1).bit_length()
            inside = max(inside, reach)
        return latency

    def _all_to_all(self, num_bytes: float, ranks: Ranks, copies: float = 1.0) -> float:
        """All-to-all of `num_bytes` from each rank, in equal shares.

        Traffic within a level overlaps with traffic out of it: the slowest decides. With hierarchical dispatch,
        `copies` divides the bytes across the group's outermost level, which are then spread within the node. On a
        torus half of all bytes cross the middle, over twice the shorter side's links: `B √D / 8` of link time.
        """
        if ranks.count == 1:
            return 0.0
        if self._sides is not None:
            link, side = self._levels[0].ring, _root(ranks.count)
            return link.step_s * side + num_bytes * side / 8 / link.bytes_per_s
        reaches = self._ranks_per_level(ranks)
        outermost = next(index for index, reach in enumerate(reaches) if reach == ranks.count)
        slowest, latency, inside, spread, innermost = 0.0, 0.0, 1, 0.0, None
        for index, level in enumerate(self._levels[: outermost + 1]):
            link, moved_bytes = level.all_to_all, num_bytes * (reaches[index] - inside) / ranks.count
            if index == outermost and outermost > 0:
                if copies > 1:
                    spread = num_bytes * (reaches[index] - inside) / ranks.count
                    moved_bytes /= copies
                elif self._rails:  # first within the node, to the device on the target's rail
                    spread = moved_bytes * (inside - 1) / inside
            if reaches[index] > inside:
                innermost = innermost or link
                slowest = max(slowest, moved_bytes / link.bytes_per_s)
                latency += link.latency_s(reaches[index])
            inside = max(inside, reaches[index])
        assert innermost is not None
        if spread:
            inner_link = self._levels[0].all_to_all
            latency += spread / inner_link.bytes_per_s + inner_link.latency_s(2)
        own_s = num_bytes / ranks.count / innermost.own_bytes_per_s
        return innermost.startup_s(num_bytes) + latency + slowest + own_s

    def _ranks_per_level(self, ranks: Ranks) -> list[int]:
        """Ranks within one group of each level; the last holds all, even if workers share devices."""
        counts = [min(ranks.count, max(1, link.devices // ranks.stride)) for link in self._levels[:-1]]
        return [*counts, ranks.count]

    def fused_exchange_s(
        self, kernel: ExchangeCost, tokens: float, row_bytes: float, moe: MoESpec, copies: int, ranks: Ranks
    ) -> float:
        """Fused dispatch of `tokens` per rank, with `copies` ranks per expert; group-limited routing bounds the
        nodes per token."""
        nodes = self.nodes_of(ranks)
        in_node = -(-ranks.count // nodes)
        target_nodes = min(nodes, moe.routing.max_expert_groups or nodes)
        experts = moe.num_experts * target_nodes // nodes
        to_ranks = copies * distinct(max(1, target_nodes * in_node // copies), experts, moe.experts_per_token)
        other_nodes = distinct(target_nodes, experts, moe.experts_per_token) * (nodes - 1) / nodes
        return kernel.seconds(tokens, row_bytes, to_ranks, other_nodes, nodes, in_node)

    def send(self, num_bytes: float, stride: int) -> float:
        """Point-to-point send to the rank `stride` further on."""
        level = next((level for level in self._levels if level.devices > stride), self._levels[-1])
        link = level.ring
        return link.startup_s(num_bytes) + link.step_s + num_bytes / link.bytes_per_s

    def nodes_of(self, ranks: Ranks) -> int:
        """Number of nodes that the ranks span."""
        return min(ranks.count, -(-ranks.count * ranks.stride // self._per_node))


@lru_cache(4096)
def distinct(bins: int, experts: int, num_chosen: int) -> float:
    """Expected number of bins hit by `num_chosen` different experts, drawn uniformly from experts spread evenly
    over `bins`."""
    per_bin = max(1, experts // bins)
    experts = max(experts, bins * per_bin, num_chosen)
    return bins * (1 - math.comb(experts - per_bin, num_chosen) / math.comb(experts, num_chosen))


def _root(count: int) -> float:
    return float(count**0.5)
