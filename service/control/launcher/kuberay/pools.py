"""Worker pods of a gang on the operator's node pools, and the pools as facts of a cluster."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.control.launcher.launcher import ClusterFacts, LaunchRefusal, NodeFacts
from service.control.launcher.slots import slots
from service.node_pool import NodePool

_MIB = 1024**2


@dataclass(frozen=True)
class WorkerPods:
    """Equal worker pods of one gang, at most one a node."""

    pool: NodePool
    num_pods: int
    workers_per_pod: int
    cpus: float
    gpus: int
    memory_bytes: int
    shared_memory_bytes: int

    @property
    def price_per_hour(self) -> float | None:
        """Price of the pods' shares of their nodes, in the operator's currency; None without a price."""
        if self.pool.node_price_per_hour is None:
            return None
        return self.num_pods * self.pool.node_price_per_hour * self.cpus / self.pool.cpus_per_node


def cluster_facts(pools: Sequence[NodePool]) -> ClusterFacts:
    """The pools' nodes, as if all were there and empty."""
    return ClusterFacts(nodes=tuple(node for pool in pools for node in _nodes(pool)), default_cluster="own")


def _nodes(pool: NodePool) -> Iterator[NodeFacts]:
    for index in range(pool.nodes):
        yield NodeFacts(
            id=f"{pool.name}/{index}",
            ip="",
            cpus=pool.cpus_per_node,
            gpus=pool.gpus_per_node,
            memory_bytes=pool.memory,
            accelerator=pool.accelerator or None,
            accelerator_memory_bytes=pool.accelerator_memory,
            pool=pool.name,
            exclusive=pool.host_network,
            price_per_hour=pool.node_price_per_hour,
        )


def worker_pods(pool: NodePool, num_workers: int, cpus_per_worker: int, gpus_per_worker: int) -> WorkerPods:
    """Pods with all of a node each; a single pod of fewer workers than a node holds has their share of it, unless it
    uses the node's network, in which two pods' ports would collide. Raises LaunchRefusal if the pool does not hold
    them."""
    per_node = slots(pool.cpus_per_node, pool.gpus_per_node, cpus_per_worker, gpus_per_worker)
    if num_workers > per_node * pool.nodes:
        raise LaunchRefusal(_too_small([pool], num_workers, cpus_per_worker, gpus_per_worker))
    workers_per_pod = min(per_node, num_workers)
    share = per_node if pool.host_network else workers_per_pod
    return WorkerPods(
        pool=pool,
        num_pods=-(-num_workers // workers_per_pod),
        workers_per_pod=workers_per_pod,
        # Thousandths of a core, and whole MiB, are what a kubelet divides exactly.
        cpus=int(round(pool.cpus_per_node * 1000 * share / per_node, 3)) / 1000,
        gpus=pool.gpus_per_node if share == per_node else gpus_per_worker * workers_per_pod,
        memory_bytes=_whole_mib(pool.memory * share // per_node),
        shared_memory_bytes=_whole_mib(pool.shared_memory_bytes * share // per_node),
    )


def whole_nodes(pool: NodePool, num_nodes: int) -> WorkerPods:
    """Pods with all of these nodes, for workers of any size."""
    return WorkerPods(
        pool=pool,
        num_pods=num_nodes,
        workers_per_pod=pool.gpus_per_node or int(pool.cpus_per_node),
        cpus=pool.cpus_per_node,
        gpus=pool.gpus_per_node,
        memory_bytes=pool.memory,
        shared_memory_bytes=pool.shared_memory_bytes,
    )


def choose_pool(
    pools: Sequence[NodePool], name: str, num_workers: int, cpus_per_worker: int, gpus_per_worker: int
) -> NodePool:
    """Pool of this name. If it is no longer listed, or none was chosen, the first that holds the workers. Raises
    LaunchRefusal."""
    for pool in sorted(pools, key=lambda pool: pool.name != name):
        if num_workers <= _room(pool, cpus_per_worker, gpus_per_worker):
            return pool
    raise LaunchRefusal(_too_small(pools, num_workers, cpus_per_worker, gpus_per_worker))


def _room(pool: NodePool, cpus_per_worker: int, gpus_per_worker: int) -> int:
    """Workers that the empty pool holds."""
    return pool.nodes * slots(pool.cpus_per_node, pool.gpus_per_node, cpus_per_worker, gpus_per_worker)


def _too_small(pools: Sequence[NodePool], num_workers: int, cpus_per_worker: int, gpus_per_worker: int) -> str:
    room = ", ".join(f"{pool.name} {_room(pool, cpus_per_worker, gpus_per_worker)}" for pool in pools)
    needs = f"{cpus_per_worker} CPUs" + (f" and {gpus_per_worker} GPU" if gpus_per_worker else "")
    return f"no node pool holds {num_workers} workers of {needs} each (room: {room or 'no pools'}); use fewer workers"


def _whole_mib(size_bytes: int) -> int:
    return size_bytes // _MIB * _MIB or size_bytes
