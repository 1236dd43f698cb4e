"""`/sweeps` and `/sweeps/{id}`: sweeps, and one's members with their values and results."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from service.web.api import item_path
from service.web.page import Web
from service.web.parallel_axes import parallel_axes
from service.web.scatter_plot import scatter_plot
from service.wire.states import OVER

PAGE_SWEEPS = 50
MAX_CURVES = 16
METHODS: Mapping[str, str] = {
    "grid": "grid", "random": "random values", "successive_halving": "successive halving",
}  # fmt: skip


async def get_sweeps(request: Request) -> Response:
    """Sweeps, newest first, a page at a time."""
    web = Web.of(request)
    cursor = request.query_params.get("cursor") or None
    sweeps = await web.api(request).get("/v1/sweeps", cursor=cursor, limit=PAGE_SWEEPS)
    next_cursor = sweeps["next_cursor"]
    return web.render(
        request,
        "sweeps.html",
        sweeps=sweeps["items"],
        methods=METHODS,
        is_first=cursor is None,
        next_page=f"/sweeps?cursor={quote(next_cursor)}" if next_cursor else None,
        is_running=any(sweep["state"] in ("running", "deleting") for sweep in sweeps["items"]),
    )


async def get_sweep(request: Request) -> Response:
    """A sweep with its picture, its members and the decisions about them."""
    web = Web.of(request)
    sweep = await web.api(request).get(item_path("/v1/sweeps", request.path_params["sweep_id"]))
    members = [member for member in sweep["members"] if member["state"] != "deleted"]
    curves = [
        {"id": member["job"], "name": member["name"] or member["job"], "isOver": member["state"] in OVER}
        for member in members
        if member["step"]
    ][:MAX_CURVES]
    return web.render(
        request,
        "sweep.html",
        sweep=sweep,
        method=METHODS.get(sweep["method"], sweep["method"]),
        labels={path: path.rpartition(".")[2] for path in sweep["fields"]},
        texts={member["number"]: {path: _text(value) for path, value in member["values"].items()}
               for member in sweep["members"]},
        picture=parallel_axes(sweep),
        plot=scatter_plot(sweep),
        curves=json.dumps(curves),
        num_curves=len(curves),
        num_started=sum(bool(member["step"]) for member in members),
        best=next((member for member in sweep["members"] if member["value"] is not None), None),
    )  # fmt: skip


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


ROUTES = [Route("/sweeps", get_sweeps, methods=["GET"]), Route("/sweeps/{sweep_id}", get_sweep, methods=["GET"])]
