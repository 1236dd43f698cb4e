"""Adds the pages to an app whose API they use."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from service.web.api import Refusal, open_client
from service.web.page import Link, Web
from service.web.pages import cluster, compare, job, jobs, login, plan, submit, sweeps, webhooks
from service.web.refusals import ProblemPages, refusal_page
from service.web.static_files import StaticFiles

LINKS = (
    Link("/", "Jobs"),
    Link("/submit", "Submit"),
    Link("/sweeps", "Sweeps"),
    Link("/cluster", "Cluster"),
    Link("/plan", "Plan"),
    Link("/webhooks", "Webhooks"),
)
"""The navigation, in order."""
_PAGES = (jobs, job, compare, sweeps, cluster, plan, submit, webhooks, login)


def install(app: Starlette) -> None:
    """Add pages, static files, and pages for refusals. The pages call the app itself."""
    web = Web(open_client(app), StaticFiles(), LINKS)
    app.state.web = web
    app.router.routes.append(web.static.route())
    for page in _PAGES:
        app.router.routes.extend(page.ROUTES)

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return refusal_page(web, request, error)

    app.add_exception_handler(Refusal, refuse)
    app.add_middleware(ProblemPages, web=web)
