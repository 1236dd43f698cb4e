"""Room of a node pool, whose gangs take nodes whole: one worker pod a node."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.control.launcher.launcher import NodeFacts
from service.control.scheduling.gang import Gang, slots

_ROUNDING = 1e-6
"""Shares of a node's cores are rounded to thousandths."""


@dataclass
class _FreeNode:
    cpus: float
    gpus: float
    is_whole: bool = True

    def holds(self, cpus: float, gpus: float) -> bool:
        return self.cpus >= cpus - _ROUNDING and self.gpus >= gpus - _ROUNDING


def workers_that_fit(nodes: Sequence[NodeFacts], gangs: Sequence[Gang], cpus: int, gpus: int) -> int:
    """Most workers of this size in a gang that fits besides the pool's gangs. The pool's nodes are equal.

    A gang of at least as many workers as a node holds takes nodes whole, also the last one; a smaller gang takes its
    share of one node, unless nodes are exclusive.
    """
    if not nodes:
        return 0
    per_node = slots(nodes[0].cpus, nodes[0].gpus, cpus, gpus)
    free = [_FreeNode(node.cpus, node.gpus) for node in nodes]
    # Large gangs first, as small ones would not be placed on separate nodes while one has room.
    for gang in sorted(gangs, key=lambda gang: gang.workers, reverse=True):
        if not _place(gang, nodes[0], free):
            return 0  # the pool shrank below a running gang: free resources are unknown, so count none
    num_whole = sum(node.is_whole for node in free)
    if num_whole or not per_node or nodes[0].exclusive:
        return num_whole * per_node
    return next((w for w in range(per_node - 1, 0, -1) if _node_for(w, per_node, gpus, nodes[0], free)), 0)


def _place(gang: Gang, node: NodeFacts, free: list[_FreeNode]) -> bool:
    """Take the gang's nodes; return whether it fits."""
    per_node = slots(node.cpus, node.gpus, gang.cpus_per_worker, gang.gpus_per_worker)
    if not per_node:
        return False
    if gang.workers < per_node and not node.exclusive:
        chosen = _node_for(gang.workers, per_node, gang.gpus_per_worker, node, free)
        if chosen is None:
            return False
        chosen.cpus -= node.cpus * gang.workers / per_node
        chosen.gpus -= gang.gpus_per_worker * gang.workers
        chosen.is_whole = False
        return True
    num_nodes = -(-gang.workers // per_node)
    whole = [free_node for free_node in free if free_node.is_whole][:num_nodes]
    for free_node in whole:
        free_node.cpus, free_node.gpus, free_node.is_whole = 0, 0, False
    return len(whole) == num_nodes


def _node_for(workers: int, per_node: int, gpus: int, node: NodeFacts, free: Sequence[_FreeNode]) -> _FreeNode | None:
    """The fullest node with room for this share."""
    fitting = [candidate for candidate in free if candidate.holds(node.cpus * workers / per_node, gpus * workers)]
    return min(fitting, key=lambda candidate: (candidate.cpus, candidate.gpus), default=None)
