"""A page: a template in the frame that all pages share, with the headers that keep foreign content out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse

from service.web import formats
from service.web.api import Api
from service.web.static_files import StaticFiles

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Content security policy of every page: nothing inline, nothing from elsewhere."""
_TEMPLATES = Path(__file__).parent / "templates"


def compile_templates() -> None:
    """Compile every template, which takes some 0.3 s, so that no page has to wait for it."""
    for name in environment().list_templates():
        environment().get_template(name)


@cache
def environment() -> jinja2.Environment:
    """The templates, with their filters; those that have been compiled stay so."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(formats.FILTERS)
    return templates


@dataclass(frozen=True)
class Link:
    """An entry of the navigation."""

    path: str
    name: str

    def is_above(self, path: str) -> bool:
        """Whether a page is one of this link's."""
        return path.startswith("/jobs/") if self.path == "/" else path.startswith(f"{self.path}/")


@dataclass(frozen=True)
class Web:
    """Parts that all pages share: the API, static files, templates and the navigation."""

    client: httpx.AsyncClient
    static: StaticFiles
    links: Sequence[Link]
    templates: jinja2.Environment = field(default_factory=environment)

    @staticmethod
    def of(request: Request) -> "Web":
        web: Web = request.app.state.web
        return web

    def api(self, request: Request) -> Api:
        """The API with the authority of this request."""
        return Api(self.client, request)

    def render(
        self,
        request: Request,
        template: str,
        *,
        status: int = 200,
        headers: dict[str, str] | None = None,
        **values: Any,
    ) -> HTMLResponse:
        """The page of a template."""
        html = self.templates.get_template(template).render(
            request_path=request.url.path,
            links=self.links,
            static=self.static.url,
            # Only services with a token set a cookie.
            has_session=any(name.startswith("shardyard-") for name in request.cookies),
            **values,
        )
        # Surrogates, which JSON can contain, cannot be encoded.
        content = html.encode("utf-8", "replace")
        return HTMLResponse(content, status, {"content-security-policy": POLICY, **(headers or {})})
