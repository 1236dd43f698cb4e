"""The outbox of webhooks: a row for each event and receiver, kept for a while after its end."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from service.control.store import tables

ROW_VERSION = 1
PENDING, DELIVERED, FAILED = "pending", "delivered", "failed"


@dataclass(frozen=True)
class DeliverySummary:
    number: int
    id: str
    webhook_id: str
    type: str
    job_id: str | None
    created_at: int
    state: str
    attempts: int
    due_at: int
    queued_at: int
    finished_at: int | None
    last_attempt: str | None


@dataclass(frozen=True)
class DeliveryRow(DeliverySummary):
    body: str


_SUMMARIES = select(*(tables.deliveries.c[field.name] for field in fields(DeliverySummary)))
_DELIVERIES = select(*(tables.deliveries.c[field.name] for field in fields(DeliveryRow)))


def insert_deliveries(tx: Connection, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        tx.execute(insert(tables.deliveries), [{"version": ROW_VERSION, **row} for row in rows])


def due_webhooks(tx: Connection, time_us: int) -> list[str]:
    """Ids of webhooks with a delivery that is due."""
    column = tables.deliveries.c
    query = select(column.webhook_id).where(column.state == PENDING, column.due_at <= time_us).distinct()
    return list(tx.scalars(query))


def next_due(tx: Connection, webhook_id: str, time_us: int) -> DeliveryRow | None:
    """The delivery of a webhook that is due first."""
    column = tables.deliveries.c
    conditions = (column.webhook_id == webhook_id, column.state == PENDING, column.due_at <= time_us)
    row = tx.execute(_DELIVERIES.where(*conditions).order_by(column.due_at, column.number).limit(1)).one_or_none()
    return None if row is None else DeliveryRow(*row)


def find_delivery(tx: Connection, webhook_id: str, id: str) -> DeliveryRow | None:
    column = tables.deliveries.c
    row = tx.execute(_DELIVERIES.where(column.webhook_id == webhook_id, column.id == id)).one_or_none()
    return None if row is None else DeliveryRow(*row)


def list_deliveries(
    tx: Connection, webhook_id: str, *, state: str | None, before: int | None, limit: int
) -> list[DeliverySummary]:
    """Deliveries of a webhook, newest first; `before` is the last number seen."""
    column = tables.deliveries.c
    query = _SUMMARIES.where(column.webhook_id == webhook_id).order_by(column.number.desc()).limit(limit)
    if state is not None:
        query = query.where(column.state == state)
    if before is not None:
        query = query.where(column.number < before)
    return [DeliverySummary(*row) for row in tx.execute(query)]


def last_deliveries(tx: Connection) -> dict[str, DeliverySummary]:
    """The newest delivery of each webhook, by the webhook's id."""
    column = tables.deliveries.c
    newest = select(func.max(column.number)).group_by(column.webhook_id)
    deliveries = [DeliverySummary(*row) for row in tx.execute(_SUMMARIES.where(column.number.in_(newest)))]
    return {delivery.webhook_id: delivery for delivery in deliveries}


def change_delivery(tx: Connection, number: int, at_attempts: int, **values: Any) -> bool:
    """Set columns if the delivery is still at this number of attempts; returns whether it was."""
    column = tables.deliveries.c
    query = update(tables.deliveries).where(column.number == number, column.attempts == at_attempts).values(**values)
    return bool(tx.execute(query).rowcount == 1)


def delete_finished(tx: Connection, before: int, limit: int) -> int:
    """Delete at most `limit` deliveries that ended before a time, or whose webhook is gone; returns their number."""
    column = tables.deliveries.c
    has_webhook = select(tables.webhooks.c.id).where(tables.webhooks.c.id == column.webhook_id).exists()
    query = select(column.number).where((column.finished_at < before) | ~has_webhook).limit(limit)
    numbers = list(tx.scalars(query))
    tx.execute(delete(tables.deliveries).where(column.number.in_(numbers)))
    return len(numbers)
