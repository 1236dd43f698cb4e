"""`/cluster`: nodes and their devices, the jobs that hold them, and the queue with the reason each job waits."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from service.web.api import Api, Refusal
from service.web.page import Web

_MAX_HOLDERS = 50
"""Jobs whose devices are looked up, one request each."""
_MAX_QUEUED = 100


@dataclass(frozen=True)
class Share:
    """Part of a resource in use; `level` is "high" from 85% on."""

    used: float
    total: float

    @property
    def level(self) -> str:
        return "high" if self.total and self.used / self.total >= 0.85 else "normal"


@dataclass(frozen=True)
class Node:
    """A node, by its cluster's facts."""

    ip: str
    pool: str
    cpus: float
    gpus: float
    memory_bytes: int
    accelerator: str | None
    price_per_hour: float | None


@dataclass(frozen=True)
class Holder:
    """A job that holds resources, and what its ranks use of their devices."""

    id: str
    name: str
    state: str
    owner: str
    workers: int
    cpus: int
    gpus: int
    pool: str
    hosts: Sequence[str]
    utilization: float | None
    """Mean over its GPUs, 0 to 1; None where nothing is measured."""
    memory: Share | None
    """Memory of the fullest GPU; None without GPUs."""


async def get_cluster(request: Request) -> Response:
    """The cluster as it is now. Without an answer from it, its place says why, and the queue is shown all the same."""
    web = Web.of(request)
    api = web.api(request)
    (cluster, problem), queued = await asyncio.gather(_cluster(api), _queue(api))
    held: list[Mapping[str, Any]] = cluster["held"] if cluster else []
    holders = [_holder(gang, job) for gang, job in zip(held, await _jobs(api, held), strict=True)]
    return web.render(
        request,
        "cluster.html",
        nodes=[_node(node) for node in cluster["nodes"]] if cluster else [],
        cluster=cluster,
        problem=problem,
        unreachable=cluster["unreachable"] if cluster else [],
        holders=holders,
        cpus=Share(sum(holder.cpus for holder in holders), cluster["cpus"]) if cluster else None,
        gpus=Share(sum(holder.gpus for holder in holders), cluster["gpus"]) if cluster else None,
        queue=queued["items"],
        num_queued=queued["total"],
    )


async def _cluster(api: Api) -> tuple[dict[str, Any] | None, str]:
    try:
        return await api.get("/v1/cluster"), ""
    except Refusal as refusal:
        if refusal.status != 503:
            raise
        return None, refusal.detail


async def _queue(api: Api) -> dict[str, Any]:
    queued: dict[str, Any] = await api.get("/v1/jobs", state="queued", sort="oldest", limit=_MAX_QUEUED, count="true")
    return queued


async def _jobs(api: Api, held: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
    """The holding jobs; None for one that has gone meanwhile, or is beyond the limit."""

    async def job(job_id: str) -> dict[str, Any] | None:
        try:
            view: dict[str, Any] = await api.get(f"/v1/jobs/{job_id}")
        except Refusal:
            return None
        return view

    jobs: list[dict[str, Any] | None] = list(
        await asyncio.gather(*(job(gang["job_id"]) for gang in held[:_MAX_HOLDERS]))
    )
    return jobs + [None] * (len(held) - len(jobs))


def _node(node: Mapping[str, Any]) -> Node:
    return Node(**{name: node[name] for name in Node.__dataclass_fields__})


def _holder(gang: Mapping[str, Any], job: Mapping[str, Any] | None) -> Holder:
    ranks = ((job or {}).get("run") or {}).get("ranks", [])
    devices = [rank["device"] for rank in ranks if rank.get("device")]
    utilizations = [device["utilization"] for device in devices if device["utilization"] is not None]
    fullest = max(
        devices, key=lambda device: device["memory_bytes"] / max(1, device["memory_total_bytes"]), default=None
    )
    return Holder(
        id=gang["job_id"],
        name=job["name"] if job else gang["job_id"],
        state=job["state"] if job else "",
        owner=job["owner"] if job else "",
        workers=gang["workers"],
        cpus=gang["workers"] * gang["cpus_per_worker"],
        gpus=gang["workers"] * gang["gpus_per_worker"],
        pool=gang["pool"],
        hosts=sorted({rank["host"] for rank in ranks if rank["host"]}),
        utilization=sum(utilizations) / len(utilizations) if utilizations else None,
        memory=Share(fullest["memory_bytes"], fullest["memory_total_bytes"]) if fullest else None,
    )


ROUTES = [Route("/cluster", get_cluster, methods=["GET"])]
