"""`/webhooks` and `/webhooks/{id}`: webhooks with their last deliveries, and the deliveries of one."""

import asyncio
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from service.web.api import item_path
from service.web.page import Web
from service.wire.states import State
from service.wire.webhooks import filter_words, outcome_words

PAGE_DELIVERIES = 50


async def get_webhooks(request: Request) -> Response:
    """All webhooks, by name, and the form that adds one."""
    web = Web.of(request)
    webhooks = (await web.api(request).get("/v1/webhooks"))["items"]
    return web.render(
        request,
        "webhooks.html",
        webhooks=webhooks,
        filters={webhook["id"]: filter_words(webhook) for webhook in webhooks},
        outcome=outcome_words,
        states=[state.value for state in State if state != State.DELETING],
    )


async def get_webhook(request: Request) -> Response:
    """A webhook with its deliveries, newest first, a page at a time."""
    web = Web.of(request)
    api, path = web.api(request), item_path("/v1/webhooks", request.path_params["webhook_id"])
    state, cursor = request.query_params.get("state") or None, request.query_params.get("cursor") or None
    webhook, deliveries = await asyncio.gather(
        api.get(path), api.get(f"{path}/deliveries", state=state, cursor=cursor, limit=PAGE_DELIVERIES)
    )
    next_cursor = deliveries["next_cursor"]
    query = f"?state={quote(state)}&" if state else "?"
    return web.render(
        request,
        "webhook.html",
        webhook=webhook,
        filter=filter_words(webhook),
        deliveries=deliveries["items"],
        outcome=outcome_words,
        state=state,
        is_first=cursor is None,
        next_page=f"/webhooks/{webhook['id']}{query}cursor={quote(next_cursor)}" if next_cursor else None,
    )


ROUTES = [
    Route("/webhooks", get_webhooks, methods=["GET"]),
    Route("/webhooks/{webhook_id}", get_webhook, methods=["GET"]),
]
