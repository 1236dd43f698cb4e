"""`/compare`: curves of several jobs over one another, their results, and the fields in which their specs differ."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from service.web.api import Api, Refusal, item_path
from service.web.page import Web
from service.wire.spec_difference import is_same, is_verbatim, job_file_text, spec_differences
from service.wire.states import OVER

MAX_JOBS = 16
"""Most jobs of one picture: more curves cannot be told apart."""
RESULTS: Mapping[str, str] = {"loss": "Loss", "nll": "NLL", "tokens_per_s": "Tokens/s"}
"""Values of the last step that the table shows, with their headings."""


@dataclass(frozen=True)
class Row:
    """A field in which specs differ."""

    path: str
    cells: Sequence[tuple[str, bool]]
    """Text of each job's value, and whether it differs from the first job's."""


async def get_comparison(request: Request) -> Response:
    """The jobs of the address, or the best of its sweep."""
    web = Web.of(request)
    api = web.api(request)
    ids = list(dict.fromkeys(id.strip() for id in request.query_params.getlist("job") if id.strip()))
    sweep = None
    if sweep_id := request.query_params.get("sweep"):
        sweep = await api.get(item_path("/v1/sweeps", sweep_id))
        members = [member["job"] for member in sweep["members"] if member["state"] != "deleted"]
        ids = list(dict.fromkeys((*ids, *members)))
    num_left_out = max(0, len(ids) - MAX_JOBS)
    answers = await asyncio.gather(*(_job(api, id) for id in ids[:MAX_JOBS]))
    jobs = [job for job, _ in answers if job is not None]
    return web.render(
        request,
        "compare.html",
        jobs=jobs,
        faults=[fault for _, fault in answers if fault],
        num_left_out=num_left_out,
        sweep=sweep,
        jobs_with_results=[(job, _results(job)) for job in jobs],
        columns=_columns(jobs),
        rows=spec_rows([job["spec"] for job in jobs]),
        curves=json.dumps([{"id": job["id"], "name": job["name"], "isOver": job["state"] in OVER} for job in jobs]),
        metric="loss" if sweep is None else sweep["metric"],
        without={job["id"]: _address([other["id"] for other in jobs if other is not job]) for job in jobs},
    )


async def _job(api: Api, id: str) -> tuple[dict[str, Any] | None, str]:
    """(job or None, why it cannot be shown)."""
    try:
        return await api.get(item_path("/v1/jobs", id)), ""
    except Refusal as refusal:
        if refusal.status not in (404, 410):
            raise
        return None, f"{id}: {refusal.detail}"


def _results(job: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of the last step and of the final report, by name."""
    last = job.get("last_metric") or {}
    report = (job.get("result") or {}).get("report") or {}
    values = {name: last.get(name) for name in RESULTS} | {
        name: value for name, value in report.items() if name != "num_steps"
    }
    return {name: value for name, value in values.items() if _is_number(value)}


def _columns(jobs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Headings of all results of the jobs, by name."""
    names = dict.fromkeys(name for job in jobs for name in _results(job))
    return {name: RESULTS.get(name, name.replace("_", " ").capitalize()) for name in names}


def spec_rows(specs: Sequence[Mapping[str, Any]]) -> list[Row]:
    differences = spec_differences(specs)
    return [
        Row(path, [(job_file_text(value), not is_same(value, values[0], is_verbatim(path))) for value in values])
        for path, values in differences.items()
    ]


def _address(ids: Sequence[str]) -> str:
    return f"/compare?{urlencode([('job', id) for id in ids])}" if ids else "/compare"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


ROUTES = [Route("/compare", get_comparison, methods=["GET"])]
