"""`/login`: asks for the token, for which the API then sets a cookie."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from service.web.api import Refusal
from service.web.page import Web
from service.web.refusals import own_path


async def get_login(request: Request) -> Response:
    """The form, unless the browser has logged in or the service has no token. `next` is the path to go on to."""
    web, next_path = Web.of(request), own_path(request.query_params.get("next", "/"))
    try:
        await web.api(request).get("/v1/service")
    except Refusal as refusal:
        if refusal.status != 401:
            raise
        return web.render(request, "login.html", next_path=next_path)
    return RedirectResponse(next_path, 303)


ROUTES = [Route("/login", get_login, methods=["GET"])]
