"""Webhooks as rows."""

from dataclasses import dataclass, fields

from sqlalchemy import Connection, delete, func, insert, select, update

from service.control.store import tables

ROW_VERSION = 1


@dataclass(frozen=True)
class WebhookRow:
    id: str
    name: str
    owner: str
    source: str
    """`api`, or `settings` for the operator's."""
    url: str
    secret: str
    options: str
    created_at: int


_WEBHOOKS = select(*(tables.webhooks.c[field.name] for field in fields(WebhookRow)))


def insert_webhook(tx: Connection, row: WebhookRow) -> None:
    tx.execute(insert(tables.webhooks).values(version=ROW_VERSION, **vars(row)))


def list_webhooks(tx: Connection) -> list[WebhookRow]:
    """All webhooks, by name."""
    return [WebhookRow(*row) for row in tx.execute(_WEBHOOKS.order_by(tables.webhooks.c.name))]


def find_webhook(tx: Connection, *, id: str | None = None, name: str | None = None) -> WebhookRow | None:
    column = tables.webhooks.c
    condition = column.id == id if id is not None else column.name == name
    row = tx.execute(_WEBHOOKS.where(condition)).one_or_none()
    return None if row is None else WebhookRow(*row)


def count_webhooks(tx: Connection) -> int:
    return int(tx.execute(select(func.count()).select_from(tables.webhooks)).scalar_one())


def delete_webhook(tx: Connection, id: str) -> None:
    """Delete a webhook with its deliveries."""
    tx.execute(delete(tables.deliveries).where(tables.deliveries.c.webhook_id == id))
    tx.execute(delete(tables.webhooks).where(tables.webhooks.c.id == id))


def replace_webhook(tx: Connection, row: WebhookRow) -> None:
    """Set all columns of the webhook with this id."""
    tx.execute(update(tables.webhooks).where(tables.webhooks.c.id == row.id).values(**vars(row)))
