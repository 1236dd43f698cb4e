"""Room in a node pool, whose gangs take whole nodes: one worker pod per node."""

from collections import Counter
from collections.abc import Sequence

from service.control.launcher.launcher import NodeFacts
from service.control.launcher.slots import slots
from service.control.scheduling.gang import Gang

_ROUNDING = 1e-6
"""Shares of a node's cores are rounded to thousandths."""

_Free = tuple[float, float]
"""(cores, GPUs) that are free on a node."""


def workers_that_fit(nodes: Sequence[NodeFacts], gangs: Sequence[Gang], cpus: int, gpus: int) -> int:
    """Size of the largest gang of such workers that fits beside the pool's gangs. All nodes of the pool are alike.

    A gang of at least as many workers as a node holds takes whole nodes, even if it does not fill the last one. A
    smaller gang takes its share of one node, unless nodes are exclusive.
    """
    if not nodes:
        return 0
    node = nodes[0]
    empty_node, per_node = (node.cpus, node.gpus), slots(node.cpus, node.gpus, cpus, gpus)
    # Nodes with the same free resources are counted together: a pool of thousands has few kinds.
    free = Counter({empty_node: len(nodes)})
    # Large gangs first, as small ones would not be placed on separate nodes while one has room.
    for gang in sorted(gangs, key=lambda gang: gang.workers, reverse=True):
        if not _place_gang(gang, node, free):
            return 0  # the pool shrank below a running gang: free resources are unknown, so count none
    if free[empty_node] or not per_node or node.exclusive:
        return free[empty_node] * per_node
    return next((size for size in range(per_node - 1, 0, -1) if _fullest(_share(node, size, per_node, gpus), free)), 0)


def _place_gang(gang: Gang, node: NodeFacts, free: Counter[_Free]) -> bool:
    """Take the gang's nodes from the free ones; return whether it fits."""
    empty_node = node.cpus, node.gpus
    per_node = slots(node.cpus, node.gpus, gang.cpus_per_worker, gang.gpus_per_worker)
    if not per_node:
        return False
    if gang.workers < per_node and not node.exclusive:
        cores, devices = _share(node, gang.workers, per_node, gang.gpus_per_worker)
        fullest = _fullest((cores, devices), free)
        if fullest is None:
            return False
        free[fullest] -= 1
        free[round(fullest[0] - cores, 6), fullest[1] - devices] += 1
        return True
    num_nodes = -(-gang.workers // per_node)
    fits = free[empty_node] >= num_nodes
    free[empty_node] -= min(num_nodes, free[empty_node])
    return fits


def _share(node: NodeFacts, workers: int, per_node: int, gpus: int) -> _Free:
    return node.cpus * workers / per_node, float(gpus * workers)


def _fullest(share: _Free, free: Counter[_Free]) -> _Free | None:
    """Free resources of the fullest node with room for a share."""
    fitting = [
        (cores, devices)
        for (cores, devices), count in free.items()
        if count and cores >= share[0] - _ROUNDING and devices >= share[1]
    ]
    return min(fitting, default=None)
