"""`/submit`: a form and its YAML, the problems beside the fields, and the plan before the job runs."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from service.web.examples import example_files
from service.web.page import Web


async def get_submit(request: Request) -> Response:
    """The form, which its script draws from `GET /v1/schema`; `?from=JOB` starts with that job's spec."""
    web = Web.of(request)
    return web.render(request, "submit.html", examples=example_files(web.static))


ROUTES = [Route("/submit", get_submit, methods=["GET"])]
