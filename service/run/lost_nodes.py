"""Lost nodes of a worker group, by its heartbeat connections and Ray's nodes.

When a node dies, its ranks' connections close, and the other ranks' collectives fail. Ray declares the node dead only
after its health checks have failed for a while, so a node is also lost if nothing listens at its raylet's port: its
other ranks end with the raylet, if they have not yet.
"""

import socket
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from service.run.heartbeat import Introduction
from service.run.heartbeat_server import HeartbeatServer

PROBE_TIMEOUT_S = 2.0
MAX_NODES = 8
"""Most nodes that a reason names."""

NodeLives = Callable[[str], bool]


def node_lives(node: str) -> bool:
    """Whether a node (Ray's id) of this Ray cluster is alive and its raylet accepts connections."""
    facts = next((facts for facts in _ray_nodes() if facts["NodeID"] == node), None)
    if facts is None or not facts["Alive"]:
        return False
    try:
        socket.create_connection((facts["NodeManagerAddress"], facts["NodeManagerPort"]), PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _ray_nodes() -> list[dict[str, Any]]:
    import ray

    return list(ray.nodes())  # type: ignore[no-untyped-call]


class LossExplainer:
    """Explains the death of a worker group by the nodes and processes that it lost."""

    def __init__(self, server: HeartbeatServer, node_lives: NodeLives = node_lives) -> None:
        self._server, self._node_lives = server, node_lives

    def __call__(self, dead_ranks: frozenset[int]) -> str:
        """Reason of the newest group's death; "" if none of its nodes and processes is known to be lost.
        `dead_ranks`: ranks whose processes Ray knows to be dead."""
        closed = self._server.closed()
        closed_ranks = {process.rank for process in closed}
        connected = [state.introduction for state in self._server.ranks() if state.rank not in closed_ranks]
        return describe_loss([*closed, *connected], closed_ranks | dead_ranks, self._node_lives)


def describe_loss(processes: Iterable[Introduction], lost_ranks: set[int], lives: NodeLives) -> str:
    """Name the lost nodes of a group, or its lost ranks if their nodes are alive; "" without lost ranks."""
    processes = list(processes)
    suspects = dict.fromkeys(process.node for process in processes if process.rank in lost_ranks)
    lost_nodes = [node for node in suspects if not lives(node)]
    if not lost_nodes:
        return describe_lost_ranks(lost_ranks)
    names = {process.node: _node_name(process) for process in processes}
    nodes = ", ".join(names[node] for node in lost_nodes[:MAX_NODES])
    if (num_more := len(lost_nodes) - MAX_NODES) > 0:
        nodes += f" and {num_more} more"
    ranks = describe_ranks([process.rank for process in processes if process.node in lost_nodes])
    if len(lost_nodes) == 1:
        return f"node {nodes} was lost; {ranks} ran there"
    return f"nodes {nodes} were lost; {ranks} ran there"


def describe_lost_ranks(lost_ranks: Iterable[int]) -> str:
    """Name lost ranks whose nodes are not known to be lost; "" for none."""
    ranks = sorted(lost_ranks)
    if not ranks:
        return ""
    if len(ranks) == 1:
        return f"{describe_ranks(ranks)} was lost: its process died"
    return f"{describe_ranks(ranks)} were lost: their processes died"


def describe_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 4-7`."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(sorted(set(ranks))), key=lambda numbered: numbered[1] - numbered[0])
    ]
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {words}"


def _node_name(process: Introduction) -> str:
    """A process's node: its address, and its host name, which is the pod's on Kubernetes."""
    if not process.address or process.address == process.host:
        return process.host
    return f"{process.address} ({process.host})"
