"""Sensitivity of a plan to links, memory, kernels and host time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moe.plan.cluster.cluster import Cluster
from moe.plan.plan import Plan
from moe.plan.request import PlanRequest
from moe.plan.search.search import LayoutSearch
from moe.plan.software import Software
from moe.spec import SpecError

_LINKS, _KERNELS, _MEMORY = 0.8, 0.8, 0.9


@dataclass(frozen=True)
class SensitivityOutcome:
    """One change of the machine, and its effect."""

    description: str
    step_s: float | None
    """Step time of the plan's own layout; None if it no longer fits."""
    best: Plan | None
    """The fastest layout after the change; None if nothing fits."""
    why_not: str = ""


def sensitivity(request: PlanRequest, cluster: Cluster, plan: Plan) -> list[SensitivityOutcome]:
    """Evaluate the plan under each change. `request` and `cluster`: its inputs."""
    outcomes = []
    for change, changed_cluster, software in _machine_changes(request, cluster):
        search = LayoutSearch(request.spec, changed_cluster, profile=request.query.profile, software=software)
        fits = search.memory.total(plan.candidate) <= changed_cluster.memory_bytes
        step_s = search.time.step_s(plan.candidate) if fits else None
        try:
            outcomes.append(SensitivityOutcome(change, step_s, search.plan(plan.num_workers, 1)))
        except SpecError as error:
            outcomes.append(SensitivityOutcome(change, step_s, None, str(error.problems[0])))
    return outcomes


def _machine_changes(request: PlanRequest, cluster: Cluster) -> Iterator[tuple[str, Cluster, Software]]:
    software = LayoutSearch.from_query(request.spec, cluster, request.query).software
    slower = f"{1 - _LINKS:.0%} slower"
    levels = len(cluster.levels)
    if levels > 1 or (cluster.num_nodes == 1 < cluster.num_devices):
        yield f"links within nodes {slower}", cluster.with_links(_LINKS, 1.0), software
    if levels > 1 and cluster.num_nodes > 1:
        yield f"links across nodes {slower}", cluster.with_links(1.0, _LINKS), software
    elif cluster.num_nodes > 1:
        yield f"links {slower}", cluster.with_links(_LINKS, _LINKS), software
    host = replace(software.host, sustained=software.host.sustained * _KERNELS)
    yield f"kernels {1 - _KERNELS:.0%} slower", cluster, replace(software, host=host)
    smaller = cluster.model_copy(update={"memory_bytes": int(cluster.memory_bytes * _MEMORY)})
    yield f"memory {1 - _MEMORY:.0%} less", smaller, software
    for name, extreme in zip(("least", "most"), software.extremes, strict=False):
        yield f"the {name} time of the host", cluster, extreme
