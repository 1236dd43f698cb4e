"""`/v1/webhooks`: add, list, test, disable and remove webhooks, and the log of their deliveries."""

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import ValidationError

from moe.spec.errors import SpecError
from moe.spec.problems import problems_of
from service.control.api.body import NoBody, SpecBody
from service.control.api.jobs import read_cursor, write_cursor
from service.control.api.openapi import refusals
from service.control.api.services import ServicesDependency
from service.control.errors import Conflict, NotFound
from service.control.report.event_text import time_text
from service.control.report.outbox import read_options
from service.control.store.deliveries import PENDING, DeliveryRow, DeliverySummary
from service.control.store.webhooks import WebhookRow
from service.wire.webhooks import WebhookOptions, WebhookSpec, shown_url

router = APIRouter(prefix="/v1", tags=["webhooks"])
_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": WebhookSpec.model_json_schema()}}}
}


@router.post("/webhooks", status_code=201, openapi_extra=_BODY, responses=refusals(Conflict))
def post_webhook(body: SpecBody, services: ServicesDependency, response: Response) -> dict[str, Any]:
    """Adds a webhook. Only this response has its `secret`, the key of the signatures."""
    try:
        spec = WebhookSpec.model_validate(body)
    except ValidationError as error:
        raise SpecError(problems_of(error)) from None
    row = services.webhooks.add(spec, services.settings.owner)
    response.headers["location"] = f"/v1/webhooks/{row.id}"
    return {**webhook_view(row), "secret": row.secret}


@router.get("/webhooks")
def get_webhooks(services: ServicesDependency) -> dict[str, Any]:
    """All webhooks, by name, with the newest delivery of each, without their secrets. Of a URL only the host and the
    last characters are shown, as its path may be a secret."""
    deliveries, give_up_s = services.webhooks.last_deliveries(), services.settings.webhook_give_up_s
    items = [
        {**webhook_view(row), "last_delivery": delivery_view(deliveries[row.id], give_up_s) if row.id in deliveries
         else None}
        for row in services.webhooks.list_all()
    ]  # fmt: skip
    return {"items": items, "next_cursor": None}


@router.get("/webhooks/{webhook}", responses=refusals(NotFound))
def get_webhook(webhook: str, services: ServicesDependency) -> dict[str, Any]:
    """A webhook, by id or name, without its secret."""
    return webhook_view(services.webhooks.find(webhook))


@router.delete("/webhooks/{webhook}", responses=refusals(NotFound, Conflict))
def remove_webhook(webhook: str, services: ServicesDependency) -> dict[str, Any]:
    """Removes a webhook with its log; what it has not been sent yet is dropped. 409 for one of the operator's."""
    return webhook_view(services.webhooks.remove(webhook))


@router.post("/webhooks/{webhook}/enable", responses=refusals(NotFound, Conflict))
def enable_webhook(webhook: str, services: ServicesDependency, _body: NoBody) -> dict[str, Any]:
    """Has a disabled webhook get events again: those from now on. 409 for one of the operator's."""
    return webhook_view(services.webhooks.enable(webhook, is_enabled=True))


@router.post("/webhooks/{webhook}/disable", responses=refusals(NotFound, Conflict))
def disable_webhook(webhook: str, services: ServicesDependency, _body: NoBody) -> dict[str, Any]:
    """Stops a webhook's events until it is enabled; what is queued is still sent. 409 for one of the operator's."""
    return webhook_view(services.webhooks.enable(webhook, is_enabled=False))


@router.post("/webhooks/{webhook}/test", responses=refusals(NotFound))
def send_test(webhook: str, services: ServicesDependency, _body: NoBody) -> dict[str, Any]:
    """Sends an event of type `test` now, once; the response says how it ended."""
    return delivery_view(services.webhooks.test(webhook), services.settings.webhook_give_up_s)


@router.get("/webhooks/{webhook}/deliveries", responses=refusals(NotFound))
def get_deliveries(
    webhook: str,
    services: ServicesDependency,
    state: Annotated[Literal["pending", "delivered", "failed"] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
    cursor: str | None = None,
) -> dict[str, Any]:
    """Deliveries of a webhook, newest first, with the outcome of the last attempt of each."""
    before = read_cursor(cursor) if cursor else None
    rows = services.webhooks.deliveries(webhook, state=state, before=before, limit=limit + 1)
    page = rows[:limit]
    return {
        "items": [delivery_view(row, services.settings.webhook_give_up_s) for row in page],
        "next_cursor": write_cursor(page[-1].number) if len(rows) > limit else None,
    }


@router.get("/webhooks/{webhook}/deliveries/{delivery}", responses=refusals(NotFound))
def get_delivery(webhook: str, delivery: str, services: ServicesDependency) -> dict[str, Any]:
    """A delivery with its body."""
    return delivery_view(services.webhooks.delivery(webhook, delivery), services.settings.webhook_give_up_s)


@router.post(
    "/webhooks/{webhook}/deliveries/{delivery}/repeat", status_code=202, responses=refusals(NotFound, Conflict)
)
def repeat_delivery(webhook: str, delivery: str, services: ServicesDependency, _body: NoBody) -> dict[str, Any]:
    """Sends a delivery again, with the same id and body."""
    return delivery_view(services.webhooks.repeat(webhook, delivery), services.settings.webhook_give_up_s)


def webhook_view(row: WebhookRow) -> dict[str, Any]:
    options = read_options(row) or WebhookOptions()
    return {
        "id": row.id,
        "name": row.name,
        "owner": row.owner,
        "source": row.source,
        "url": shown_url(row.url),
        **options.model_dump(mode="json"),
        "created_at": time_text(row.created_at),
    }


def delivery_view(row: DeliverySummary, give_up_s: float) -> dict[str, Any]:
    """A delivery; `next_attempt_at` and `gives_up_at` while it is pending."""
    is_pending = row.state == PENDING
    attempt = json.loads(row.last_attempt) if row.last_attempt else None
    if attempt is not None:
        attempt["time"] = time_text(attempt["time"])
    view = {
        "id": row.id,
        "type": row.type,
        "job_id": row.job_id,
        "state": row.state,
        "created_at": time_text(row.created_at),
        "attempts": row.attempts,
        "next_attempt_at": time_text(row.due_at) if is_pending else None,
        "gives_up_at": time_text(row.queued_at + int(give_up_s * 1e6)) if is_pending else None,
        "finished_at": None if row.finished_at is None else time_text(row.finished_at),
        "last_attempt": attempt,
    }
    return view | ({"body": row.body} if isinstance(row, DeliveryRow) else {})
