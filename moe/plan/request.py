"""Plan request: a job, and the cluster to plan it for."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe.plan.cluster.cluster import Cluster
from moe.plan.cluster.pools import Pools, cluster_of
from moe.plan.named_option import require_one_of
from moe.plan.profile import PROFILES
from moe.plan.query import GOALS, PlanQuery
from moe.plan.software import SOFTWARE
from moe.spec import JobSpec, spec_error
from moe.spec.files import read_plain

MAX_RUNNERS_UP = 100


_QUERY_KEYS = ("num_workers", "top", "profile", "software", "goal")


@dataclass(frozen=True)
class PlanRequest:
    """A job, the cluster to plan it for (by default the available one), and the query."""

    spec: JobSpec
    cluster: Cluster | Pools | None = None
    query: PlanQuery = field(default_factory=PlanQuery)


def plan_request(fields: Any) -> PlanRequest:
    """Parse the body of `POST /v1/plans` or a file of `shardyard plan`: a job, or `{spec: ...}` with the cluster and
    the query's keys. Raises SpecError with every problem of the first invalid part."""
    parts = fields if isinstance(fields, dict) and "spec" in fields else {"spec": fields}
    for key in parts:
        if key not in ("spec", "cluster", *_QUERY_KEYS):
            raise spec_error("unknown_key", key, parts[key], "is not a key of a plan request", "remove it")
    cluster = parts.get("cluster")
    return PlanRequest(
        spec=JobSpec.parse(parts["spec"]),
        cluster=None if cluster is None else cluster_of(cluster),
        query=PlanQuery(
            num_workers=_whole_number("num_workers", parts.get("num_workers")),
            top=_whole_number("top", parts.get("top"), limit=MAX_RUNNERS_UP) or PlanQuery.top,
            profile=require_one_of("profile", parts.get("profile"), PROFILES),
            software=require_one_of("software", parts.get("software"), SOFTWARE),
            goal=require_one_of("goal", parts.get("goal"), GOALS),
        ),
    )


def _whole_number(name: str, value: Any, limit: int = 1_000_000) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 < value <= limit):
        return value
    raise spec_error("out_of_range", name, value, f"must be a whole number from 1 to {limit}", "correct it or omit it")


def read_plan_request(path: str | Path) -> PlanRequest:
    """Read a YAML or JSON file. Raises SpecError if it is invalid, OSError if it cannot be read."""
    return plan_request(read_plain(path))
