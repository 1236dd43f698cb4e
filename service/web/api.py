"""The public API, called in this process with the authority of the user whose page is being rendered."""

import re
from collections.abc import AsyncIterable
from typing import Any

import httpx
from starlette.requests import Request
from starlette.types import ASGIApp

_FORWARDED = (b"authorization", b"cookie", b"host")
"""Headers by which the API decides whether to answer."""
_ID = re.compile(r"[A-Za-z0-9-]{1,64}")


class Refusal(Exception):
    """A problem response of the API (RFC 9457)."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(status, problem)
        self.status, self.problem = status, problem

    @property
    def detail(self) -> str:
        return str(self.problem.get("detail") or self.problem.get("title") or f"status {self.status}")


class Api:
    """Calls routes of an ASGI app with the headers of one request, so that all refusals of the API apply to pages."""

    def __init__(self, client: httpx.AsyncClient, request: Request) -> None:
        self._client = client
        # As bytes: other services of the same host may have set cookies that are not ASCII.
        self._headers = [(name, value) for name, value in request.headers.raw if name in _FORWARDED]

    async def get(self, path: str, **parameters: Any) -> Any:
        """JSON of a GET; parameters that are None are left out. Raises Refusal."""
        response = await self._client.get(
            path, params=_without_none(parameters), headers=[*self._headers, (b"accept", b"application/json")]
        )
        return _content(response)

    async def post(self, path: str, body: AsyncIterable[bytes], media_type: str) -> Any:
        """JSON of a POST that changes nothing, such as a dry run: changes are made by the browser itself, whose
        origin is then checked. The route reads the body no further than its limit. Raises Refusal."""
        headers = [
            *self._headers, (b"accept", b"application/json"), (b"content-type", media_type.encode("latin-1")),
        ]  # fmt: skip
        return _content(await self._client.post(path, content=body, headers=headers))


def item_path(collection: str, id: str) -> str:
    """Path of a job or sweep. Raises Refusal for an id that none can have, as `/`, `?` and `..` would lead to another
    route."""
    if not _ID.fullmatch(id):
        raise Refusal(404, {"title": "Not found", "detail": f"there is no {id[:100]!r} in {collection}"})
    return f"{collection}/{id}"


def open_client(app: ASGIApp) -> httpx.AsyncClient:
    """A client of the app, without a network in between."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost", trust_env=False, timeout=None
    )


def _without_none(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None}


def _content(response: httpx.Response) -> Any:
    try:
        content = response.json()
    except ValueError:
        content = {"detail": f"the API answered {response.status_code} without JSON"}
        raise Refusal(response.status_code, content) from None
    if response.is_error:
        raise Refusal(response.status_code, content)
    return content
