"""`/v1/plans` and `/v1/cluster`: what would be done, and what there is to do it on."""

import json
from typing import Any

from fastapi import APIRouter
from pydantic import ValidationError

from moe.plan import Cluster
from moe.spec import JobSpec, SpecError
from moe.spec.errors import Problem
from service.api.body import SpecBody
from service.api.services import Called
from service.errors import Unavailable
from service.launch.launcher import LauncherUnavailable
from service.lifecycle.planning import plan_on
from service.lifecycle.states import ACTIVE
from service.store.jobs import jobs_in

router = APIRouter(prefix="/v1", tags=["plans"])
_FACTS_AGE_S = 2.0


@router.post("/plans")
def post_plan(body: SpecBody, services: Called) -> dict[str, Any]:
    """The plan for a spec, or for `{"spec": ..., "cluster": ..., "num_workers": ...}`; nothing is stored.

    Without `cluster` it is made for the cluster at hand, and all that `POST /v1/jobs` checks is checked.
    """
    given = body if isinstance(body, dict) and "spec" in body else {"spec": body}
    _refuse_unknown(given)
    spec = JobSpec.parse(given["spec"])
    num_workers = _num_workers(given.get("num_workers"))
    if (facts := given.get("cluster")) is not None:
        plan = plan_on(spec, _cluster(facts), num_workers)
    else:
        try:
            plan = services.requests.plan(spec, num_workers)
        except LauncherUnavailable as error:
            raise Unavailable(
                f"the cluster cannot be reached: {error}; "
                "give the facts of one as 'cluster' to plan without it"
            ) from None
    return plan.model_dump(mode="json")


@router.get("/cluster")
def get_cluster(services: Called) -> dict[str, Any]:
    """The nodes of the cluster at hand, and what jobs hold of them."""
    try:
        facts = services.watch.facts(_FACTS_AGE_S)
    except LauncherUnavailable as error:
        raise Unavailable(f"the cluster cannot be reached: {error}") from None
    with services.database.read() as tx:
        jobs = jobs_in(tx, ACTIVE)
    return {
        "nodes": [node.model_dump(mode="json") for node in facts.nodes],
        "num_nodes": len(facts.nodes),
        "cpus": facts.cpus,
        "gpus": facts.gpus,
        "memory_bytes": sum(node.memory_bytes for node in facts.nodes),
        "held": [{"job_id": job.id, **json.loads(job.gang)} for job in jobs if job.launch and job.gang],
    }


def _refuse_unknown(given: dict[str, Any]) -> None:
    for key in given:
        if key not in ("spec", "cluster", "num_workers"):
            raise SpecError(Problem(key, given[key], "is not a key of a plan request", "remove it"))


def _num_workers(given: Any) -> int | None:
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    raise SpecError(
        Problem("num_workers", given, "must be a whole number above 0", "correct it or leave it out")
    )


def _cluster(given: Any) -> Cluster:
    try:
        return Cluster.model_validate(given)
    except ValidationError as error:
        raise SpecError(
            Problem(
                ".".join(("cluster", *map(str, entry["loc"]))),
                entry["input"] if entry["type"] != "missing" else None,
                str(entry["msg"]).replace("Input should be", "must be"),
                "a cluster has num_nodes, devices_per_node, device and memory_bytes",
            )
            for entry in error.errors(include_url=False)
        ) from None
