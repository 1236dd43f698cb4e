"""`/login`: asks for the token, for which the API then sets a cookie."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from service.web.page import Web
from service.web.refusals import own_path


async def get_login(request: Request) -> Response:
    """The form; `next` is the path of this service to go on to."""
    return Web.of(request).render(request, "login.html", next_path=own_path(request.query_params.get("next", "/")))


ROUTES = [Route("/login", get_login, methods=["GET"])]
