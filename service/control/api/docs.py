"""`/docs`: all routes on one page, without scripts or external resources."""

from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

router = APIRouter()


@router.get("/docs", include_in_schema=False)
async def get_docs(request: Request) -> HTMLResponse:
    """`/openapi.json` as a page."""
    return HTMLResponse(_page(request.app.openapi()))


def _page(schema: dict[str, Any]) -> str:
    routes = "".join(
        _route(method, path, operation)
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    )
    title, summary = escape(schema["info"]["title"]), escape(schema["info"].get("summary", ""))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<h1>{title}</h1><p>{summary} For programs: <a href="/openapi.json">/openapi.json</a>; '
        f"the schema of a job spec: <code>GET /v1/schema</code>.</p>{routes}</html>"
    )


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    parameters = "".join(
        f"<li><code>{escape(parameter['name'])}</code> ({escape(parameter['in'])}"
        f"{', required' if parameter.get('required') else ''}) {escape(parameter.get('description', ''))}</li>"
        for parameter in operation.get("parameters", ())
    )
    description = "".join(f"<p>{escape(part)}</p>" for part in operation.get("description", "").split("\n\n"))
    return f"<h2><code>{method.upper()} {escape(path)}</code></h2>{description}<ul>{parameters}</ul>"
