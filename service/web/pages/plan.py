"""`/plan`: the planner on machines that one need not have; `/fragments/plan`: a plan as part of a page."""

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from moe.plan import Plan
from moe.plan.cluster.devices import DEVICES
from service.web.api import Refusal
from service.web.examples import example_files
from service.web.layout_bars import layout_bars
from service.web.page import Web
from service.web.plan_picture import plan_picture

_MAX_REASONS = 12


async def get_plan(request: Request) -> Response:
    """The form: a spec, and this cluster or a described one."""
    web = Web.of(request)
    return web.render(
        request, "plan.html", examples=example_files(web.static), devices=[name for name in DEVICES if name != "cpu"]
    )


async def post_plan_fragment(request: Request) -> Response:
    """The plan of a request as `POST /v1/plans` takes it, as HTML: its figures, its best layouts as a picture, and the
    reasons. Refusals are the API's."""
    web = Web.of(request)
    media_type = request.headers.get("content-type", "application/yaml")
    try:
        fields = await web.api(request).post("/v1/plans", request.stream(), media_type)
    except Refusal as refusal:
        return JSONResponse(refusal.problem, refusal.status, media_type="application/problem+json")
    plan = Plan.model_validate(fields)
    html = web.templates.get_template("plan_fragment.html").render(
        plan=plan,
        mesh=plan_picture(fields, None),
        bars=None if plan.module is not None else layout_bars(plan),
        reasons=plan.reasons[:_MAX_REASONS],
        missing=fields.get("missing", ()),
    )
    return HTMLResponse(html.encode("utf-8", "replace"))


ROUTES = [Route("/plan", get_plan, methods=["GET"]), Route("/fragments/plan", post_plan_fragment, methods=["POST"])]
