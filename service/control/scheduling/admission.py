"""Admission: gangs in order of arrival, with reasons for waiting."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe.spec import ResourcesSpec
from service.control.launcher.launcher import ClusterFacts, NodeFacts
from service.control.launcher.slots import slots
from service.control.scheduling.gang import Gang, describe_workers
from service.control.scheduling.pool_room import workers_that_fit


@dataclass(frozen=True)
class Admit:
    gang: Gang
    """The largest number of workers in the job's range that fits now."""


@dataclass(frozen=True)
class MustWait:
    """The job must wait until other jobs release resources."""

    reason: str


@dataclass(frozen=True)
class NeverFits:
    """The cluster is too small even when empty."""

    reason: str


@dataclass(frozen=True)
class PlanPending:
    """A queued module job without a plan yet; jobs behind it may start first."""


Admission = Admit | MustWait | NeverFits


def gpus_per_worker(resources: ResourcesSpec, cluster: ClusterFacts) -> int:
    """GPUs per worker with `auto` resolved: one if the job's cluster has GPUs."""
    if resources.gpus_per_worker == "auto":
        return 1 if cluster.for_job(resources).gpus >= 1 else 0
    return resources.gpus_per_worker


def admit(resources: ResourcesSpec, cluster: ClusterFacts, gangs: Mapping[str, Gang]) -> Admission:
    """Decide whether a job can start now, beside the gangs of other jobs (by job id)."""
    cluster = cluster.for_job(resources)
    gpus = gpus_per_worker(resources, cluster)
    cpus = resources.cpus_per_worker
    min_workers, max_workers = resources.min_num_workers, resources.max_num_workers
    needs = describe_workers(min_workers, cpus, gpus)
    pools = nodes_by_pool(cluster, gpus)
    capacity = max((_capacity(nodes, cpus, gpus) for nodes in pools.values()), default=0)
    if capacity < min_workers:
        location = "the largest of its node pools has room" if len(pools) > 1 else "room"
        return NeverFits(
            f"needs {needs}; the cluster has {_resources_in_words(cluster)}, {location} for {capacity} such workers"
        )
    room = {
        pool: min(max_workers, _room(pool, nodes, [gang for gang in gangs.values() if gang.pool == pool], cpus, gpus))
        for pool, nodes in pools.items()
    }
    pool = max(room, key=lambda name: room[name])  # the first of several
    if room[pool] < min_workers:
        return MustWait(f"needs {needs}; of the cluster's {_resources_in_words(cluster)}, {_holders_in_words(gangs)}")
    return Admit(Gang(room[pool], cpus, gpus, pool))


def nodes_by_pool(cluster: ClusterFacts, gpus_per_worker: int) -> dict[str, list[NodeFacts]]:
    """Nodes by node pool, in the operator's order; for workers without a GPU, pools without GPUs come first. A gang
    runs on one pool; a standing Ray cluster is a single pool ""."""
    pools: dict[str, list[NodeFacts]] = {}
    for node in cluster.nodes:
        pools.setdefault(node.pool, []).append(node)
    return dict(sorted(pools.items(), key=lambda item: bool(item[1][0].gpus) and not gpus_per_worker and item[0] != ""))


def _capacity(nodes: Sequence[NodeFacts], cpus: int, gpus: int) -> int:
    return sum(slots(node.cpus, node.gpus, cpus, gpus) for node in nodes)


def _room(pool: str, nodes: Sequence[NodeFacts], gangs: Sequence[Gang], cpus: int, gpus: int) -> int:
    """Number of workers of this size that fit beside the pool's gangs."""
    if pool:
        return workers_that_fit(nodes, gangs, cpus, gpus)
    return _room_worker_by_worker(nodes, gangs, cpus, gpus)


def _room_worker_by_worker(nodes: Sequence[NodeFacts], gangs: Sequence[Gang], cpus: int, gpus: int) -> int:
    """Number of workers of this size that fit beside the gangs, which are assumed to be packed node by node."""
    free = [(node.cpus, node.gpus) for node in nodes]
    for gang in gangs:
        num_unplaced = gang.workers
        for index, (free_cpus, free_gpus) in enumerate(free):
            num_placed = min(num_unplaced, slots(free_cpus, free_gpus, gang.cpus_per_worker, gang.gpus_per_worker))
            free[index] = (free_cpus - num_placed * gang.cpus_per_worker, free_gpus - num_placed * gang.gpus_per_worker)
            num_unplaced -= num_placed
        if num_unplaced:
            # The cluster shrank below a running gang: free resources are unknown, so count none.
            return 0
    return sum(slots(free_cpus, free_gpus, cpus, gpus) for free_cpus, free_gpus in free)


def fingerprint(cluster: ClusterFacts) -> str:
    """Hash of the cluster's resources, independent of node names."""
    offers = sorted(
        (node.cpus, node.gpus, node.memory_bytes >> 20, node.accelerator or "", *([node.pool] if node.pool else []))
        for node in cluster.nodes
    )
    return hashlib.sha256(repr(offers).encode()).hexdigest()


def _resources_in_words(cluster: ClusterFacts) -> str:
    gpus = f" and {cluster.gpus:g} GPUs" if cluster.gpus else ""
    nodes = len(cluster.nodes)
    return f"{cluster.cpus:g} CPUs{gpus} on {nodes} node{'s' if nodes != 1 else ''}"


def _holders_in_words(gangs: Mapping[str, Gang], limit: int = 3) -> str:
    holders = [
        f"{job_id} holds {gang.workers * gang.cpus_per_worker} CPUs"
        + (f" and {gang.workers * gang.gpus_per_worker} GPUs" if gang.gpus_per_worker else "")
        for job_id, gang in list(gangs.items())[:limit]
    ]
    num_others = len(gangs) - limit
    return ", ".join(holders) + (f" and {num_others} other jobs hold the rest" if num_others > 0 else "")
