"""Plan request: a job, and the cluster to plan it for."""

from pathlib import Path
from typing import Any

from moe.plan.cluster.cluster import Cluster
from moe.plan.cluster.pools import Pools, cluster_of
from moe.plan.goal import GOALS, Goal
from moe.plan.named_option import one_of
from moe.plan.profile import PROFILES, ProfileName
from moe.plan.software import SOFTWARE, SoftwareName
from moe.spec import JobSpec, Problem, SpecError
from moe.spec.base import Count, Frozen
from moe.spec.files import read_plain

MAX_RUNNERS_UP = 100


class PlanRequest(Frozen):
    """Body of `POST /v1/plans` and input of `shardyard plan`: a job file, or `{spec: ...}` with other keys."""

    spec: JobSpec
    cluster: Cluster | Pools | None = None
    """By default, the available cluster."""
    num_workers: Count | None = None
    top: Count = 5
    """Layouts to report, the chosen one included."""
    profile: ProfileName | None = None
    """Executor to price for: `ours` (default), `peer` (Megatron-Core) or `torchtitan`."""
    software: SoftwareName | None = None
    """Source of host times and sustained rates; by default `ours-eager`, or `megatron-eager` for a peer."""
    goal: Goal | None = None
    """Chooses the number of workers within the job's range, and the pool. By default the most workers that there are
    devices for, and the fastest pool."""


def plan_request(fields: Any) -> PlanRequest:
    """Parse plain data. Raises SpecError with every problem of the first invalid part."""
    parts = fields if isinstance(fields, dict) and "spec" in fields else {"spec": fields}
    for key in parts:
        if key not in PlanRequest.model_fields:
            raise SpecError(
                Problem("unknown_key", key, parts[key], "is not a key of a plan request", "remove it")
            )
    cluster = parts.get("cluster")
    return PlanRequest(
        spec=JobSpec.parse(parts["spec"]),
        cluster=None if cluster is None else cluster_of(cluster),
        num_workers=_whole_number("num_workers", parts.get("num_workers")),
        top=_whole_number("top", parts.get("top"), limit=MAX_RUNNERS_UP) or 5,
        profile=one_of("profile", parts.get("profile"), PROFILES),
        software=one_of("software", parts.get("software"), SOFTWARE),
        goal=one_of("goal", parts.get("goal"), GOALS),
    )


def _whole_number(name: str, value: Any, limit: int = 1_000_000) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 < value <= limit):
        return value
    raise SpecError(
        Problem(
            "out_of_range",
            name,
            value,
            f"must be a whole number from 1 to {limit}",
            "correct it or leave it out",
        )
    )


def read_plan_request(path: str | Path) -> PlanRequest:
    """Read a YAML or JSON file. Raises SpecError if it is invalid, OSError if it cannot be read."""
    return plan_request(read_plain(path))
