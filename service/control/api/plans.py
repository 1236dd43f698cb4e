"""`/v1/plans` and `/v1/cluster`: plans of jobs, and the cluster's facts."""

import json
from typing import Any

from fastapi import APIRouter

from moe.plan import plan_request
from service.control.api.body import NoBody, SpecBody
from service.control.api.openapi import refusals
from service.control.api.services import ServicesDependency
from service.control.errors import Conflict, Unavailable
from service.control.launcher.launcher import CalibrationUnsupported, LauncherUnavailable, LaunchRefusal
from service.control.store.jobs import JobRow, jobs_in
from service.wire.states import ACTIVE

router = APIRouter(prefix="/v1", tags=["plans"])
_FACTS_AGE_S = 2.0


@router.post("/plans")
def post_plan(body: SpecBody, services: ServicesDependency) -> dict[str, Any]:
    """The plan for a spec, or for `{"spec": ..., "cluster": ..., "num_workers": ..., "top": ..., "profile": ...,
    "software": ..., "goal": ...}`. Nothing is stored.

    Without `cluster`, it is made for the current cluster and checked like `POST /v1/jobs`. With one, it may be a plan
    that cannot run yet, and says so. Neither needs a model's weights; what a run needs is in `missing`.
    """
    request = plan_request(services.requests.expand(body))
    try:
        plan = services.requests.plans.make_plan(request)
    except LauncherUnavailable as error:
        raise Unavailable(
            f"{services.watch.describe_outage(error)}; to plan without it, describe a cluster in 'cluster'"
        ) from None
    return plan.model_dump(mode="json")


@router.post("/cluster/calibration", responses=refusals(Conflict))
def post_calibration(services: ServicesDependency, _body: NoBody) -> dict[str, Any]:
    """Measures some of the cluster's devices and links for future plans, in seconds to minutes; 409 without free
    resources or during another measurement."""
    try:
        return services.watch.calibrate().model_dump(mode="json")
    except LauncherUnavailable as error:
        raise Unavailable(services.watch.describe_outage(error)) from None
    except CalibrationUnsupported as error:
        raise Conflict(str(error)) from None
    except LaunchRefusal as error:
        holders = ", ".join(job.id for job in _holding_jobs(services))
        raise Conflict(f"{error}; {holders} held its resources" if holders else str(error)) from None


@router.get("/cluster")
def get_cluster(services: ServicesDependency) -> dict[str, Any]:
    """Nodes of the current clusters, their calibration, and resources held by jobs; `unreachable` has the clusters that
    do not answer beside another that does."""
    silent = services.controller.unreachable
    if len(silent) == len(services.controller.clusters):  # known, without waiting for a cluster that hangs
        raise Unavailable(next(iter(silent.values())))
    try:
        facts = services.watch.facts(_FACTS_AGE_S)
    except LauncherUnavailable as error:
        raise Unavailable(services.watch.describe_outage(error)) from None
    for kind, failure in services.watch.silent_clusters(_FACTS_AGE_S).items():
        silent.setdefault(kind, services.watch.describe_outage(failure))
    jobs = _holding_jobs(services)
    return {
        "nodes": [node.model_dump(mode="json") for node in facts.nodes],
        "num_nodes": len(facts.nodes),
        "cpus": facts.cpus,
        "gpus": facts.gpus,
        "memory_bytes": sum(node.memory_bytes for node in facts.nodes),
        "calibrations": [calibration.model_dump(mode="json") for calibration in facts.calibrations],
        "held": [{"job_id": job.id, **json.loads(job.gang)} for job in jobs if job.gang],
        "unreachable": [{"cluster": kind, "reason": reason} for kind, reason in silent.items()],
    }


def _holding_jobs(services: ServicesDependency) -> list[JobRow]:
    """Jobs whose gangs hold resources of the cluster."""
    with services.database.read() as tx:
        return [job for job in jobs_in(tx, ACTIVE) if job.launch and job.gang]
