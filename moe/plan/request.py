"""Request to the planner: a job, and the cluster to plan it for."""

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
    """A job file, or `{spec: ...}` with more keys, each of which may be left out: `cluster`, `num_workers`, `top`,
    `profile`, `software`, `goal`. The body of `POST /v1/plans`, and what `shardyard plan` reads."""

    spec: JobSpec
    cluster: Cluster | Pools | None = None
    """Left out, the cluster at hand."""
    num_workers: Count | None = None
    top: Count = 5
    """Layouts that are told of, the chosen one included."""
    profile: ProfileName | None = None
    """Whose executor it is priced for: `ours`, also where it is left out, or that of a `peer`, Megatron-Core, or
    `torchtitan`."""
    software: SoftwareName | None = None
    """Software whose host times and sustained rates price it; left out, `ours-eager`, or of a peer `megatron-eager`."""
    goal: Goal | None = None
    """Goal by which the number of workers, of the range that the job may have, and the pool are chosen; left out, it
    has the most workers that there are devices for, and of pools the fastest is taken."""


def plan_request(fields: Any) -> PlanRequest:
    """The request that plain data describes. Raises SpecError with every problem of its first wrong part."""
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
    """The request in a YAML or JSON file. Raises SpecError for what is wrong with it, OSError if it cannot be read."""
    return plan_request(read_plain(path))
