"""Admission: gangs in order of arrival, with reasons for waiting."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe.spec import ResourcesSpec
from service.control.launcher.launcher import ClusterFacts, NodeFacts


@dataclass(frozen=True)
class Gang:
    """Workers that start together or not at all, and the resources of each."""

    workers: int
    cpus_per_worker: int
    gpus_per_worker: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Gang":
        return cls(int(fields["workers"]), int(fields.get("cpus_per_worker", 1)), int(fields.get("gpus_per_worker", 0)))

    def __str__(self) -> str:
        return _needs(self.workers, self.cpus_per_worker, self.gpus_per_worker)


@dataclass(frozen=True)
class Admit:
    gang: Gang
    """As many workers as fit now, within the job's range."""


@dataclass(frozen=True)
class MustWait:
    """The job must wait until other jobs release resources."""

    reason: str


@dataclass(frozen=True)
class NeverFits:
    """The cluster is too small even when empty."""

    reason: str


Admission = Admit | MustWait | NeverFits


def gpus_per_worker(resources: ResourcesSpec, cluster: ClusterFacts) -> int:
    """GPUs per worker with `auto` resolved: one if the cluster has GPUs."""
    if resources.gpus_per_worker == "auto":
        return 1 if cluster.gpus >= 1 else 0
    return resources.gpus_per_worker


def admit(resources: ResourcesSpec, cluster: ClusterFacts, gangs: Mapping[str, Gang]) -> Admission:
    """Whether a job can start now, besides other jobs' gangs (by id)."""
    gpus = gpus_per_worker(resources, cluster)
    cpus = resources.cpus_per_worker
    min_workers, max_workers = resources.min_num_workers, resources.max_num_workers
    needs = _needs(min_workers, cpus, gpus)
    empty = sum(_slots(node.cpus, node.gpus, cpus, gpus) for node in cluster.nodes)
    if empty < min_workers:
        return NeverFits(f"needs {needs}; the cluster has {_has(cluster)}, room for {empty} such workers")
    num_workers = min(max_workers, _room(cluster.nodes, list(gangs.values()), cpus, gpus))
    if num_workers < min_workers:
        return MustWait(f"needs {needs}; of the cluster's {_has(cluster)}, {_holders(gangs)}")
    return Admit(Gang(num_workers, cpus, gpus))


def _room(nodes: Sequence[NodeFacts], gangs: Sequence[Gang], cpus: int, gpus: int) -> int:
    """Workers of this size that fit besides the gangs, assumed to be packed node by node."""
    free = [(node.cpus, node.gpus) for node in nodes]
    for gang in gangs:
        left = gang.workers
        for index, (free_cpus, free_gpus) in enumerate(free):
            num_placed = min(left, _slots(free_cpus, free_gpus, gang.cpus_per_worker, gang.gpus_per_worker))
            free[index] = (free_cpus - num_placed * gang.cpus_per_worker, free_gpus - num_placed * gang.gpus_per_worker)
            left -= num_placed
        if left:
            # The cluster shrank below a running gang: free resources are unknown, so count none.
            return 0
    return sum(_slots(free_cpus, free_gpus, cpus, gpus) for free_cpus, free_gpus in free)


def _slots(cpus: float, gpus: float, cpus_each: int, gpus_each: int) -> int:
    by_cpu = int(cpus // cpus_each)
    return min(by_cpu, int(gpus // gpus_each)) if gpus_each else by_cpu


def fingerprint(cluster: ClusterFacts) -> str:
    """Hash of the cluster's resources, independent of node names."""
    offers = sorted((node.cpus, node.gpus, node.memory_bytes >> 20, node.accelerator or "") for node in cluster.nodes)
    return hashlib.sha256(repr(offers).encode()).hexdigest()


def _needs(workers: int, cpus: int, gpus: int) -> str:
    worker_needs = f"{cpus} CPU{'s' if cpus > 1 else ''}" + (f" and {gpus} GPU" if gpus else "")
    return f"{workers} worker{'s' if workers > 1 else ''} of {worker_needs} each"


def _has(cluster: ClusterFacts) -> str:
    gpus = f" and {cluster.gpus:g} GPUs" if cluster.gpus else ""
    nodes = len(cluster.nodes)
    return f"{cluster.cpus:g} CPUs{gpus} on {nodes} node{'s' if nodes != 1 else ''}"


def _holders(gangs: Mapping[str, Gang], limit: int = 3) -> str:
    holders = [
        f"{job_id} holds {gang.workers * gang.cpus_per_worker} CPUs"
        + (f" and {gang.workers * gang.gpus_per_worker} GPUs" if gang.gpus_per_worker else "")
        for job_id, gang in list(gangs.items())[:limit]
    ]
    num_others = len(gangs) - limit
    return ", ".join(holders) + (f" and {num_others} other jobs hold the rest" if num_others > 0 else "")
