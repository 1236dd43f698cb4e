"""Users' and the operator's webhooks: added, listed, tested and removed."""

import asyncio
import base64
import secrets
from collections.abc import Sequence
from dataclasses import replace

import structlog

from moe.spec.errors import Problem, spec_error
from service.control.errors import Conflict, NotFound
from service.control.report.outbox import TEST, body_of, new_delivery_id, read_options
from service.control.store.clock import now_us
from service.control.store.database import Database, WriteConflict
from service.control.store.deliveries import (
    DELIVERED,
    FAILED,
    PENDING,
    DeliveryRow,
    DeliverySummary,
    change_delivery,
    find_delivery,
    insert_deliveries,
    last_deliveries,
    list_deliveries,
)
from service.control.store.webhooks import (
    WebhookRow,
    count_webhooks,
    delete_webhook,
    find_webhook,
    insert_webhook,
    list_webhooks,
    replace_webhook,
)
from service.control.webhooks.addresses import REMEDY, AddressRule
from service.control.webhooks.deliveries import attempt_headers, to_text
from service.control.webhooks.sender import Sender
from service.control.webhooks.signature import new_secret
from service.wire.webhooks import WebhookOptions, WebhookSpec, literal_address

MAX_WEBHOOKS = 100
OPERATOR = "settings"
log = structlog.get_logger(__name__)


class Webhooks:
    """Manages webhooks; `Deliveries` sends to them."""

    def __init__(self, database: Database, sender: Sender, rule: AddressRule) -> None:
        self._database, self._sender, self._rule = database, sender, rule

    def add(self, spec: WebhookSpec, owner: str) -> WebhookRow:
        """Store a webhook; the row has its secret. Raises SpecError for an address that is not permitted, Conflict for
        a name that is taken."""
        address = literal_address(spec.url)
        if address is not None and not self._rule.permits(address):
            raise spec_error("not_allowed", "url", spec.url, "is not a public address", REMEDY)
        row = _row_of(spec, owner, "api")
        with self._database.write() as tx:
            if (other := find_webhook(tx, name=spec.name)) is not None:
                rule = f"is the name of the webhook {other.id}"
                problem = Problem("already_exists", "name", spec.name, rule, "choose another, or remove that one")
                raise Conflict(str(problem), problem)
            if count_webhooks(tx) >= MAX_WEBHOOKS:
                raise Conflict(f"there are {MAX_WEBHOOKS} webhooks, the most that this service has; remove one first")
            insert_webhook(tx, row)
        log.info("added a webhook", webhook=spec.name, owner=owner)
        return row

    def list_all(self) -> list[WebhookRow]:
        with self._database.read() as tx:
            return list_webhooks(tx)

    def find(self, name_or_id: str) -> WebhookRow:
        """Raises NotFound."""
        with self._database.read() as tx:
            row = find_webhook(tx, id=name_or_id) or find_webhook(tx, name=name_or_id)
        if row is None:
            raise NotFound(f"there is no webhook {name_or_id[:100]!r}; 'shardyard webhooks ls' lists them")
        return row

    def last_deliveries(self) -> dict[str, DeliverySummary]:
        """The newest delivery of each webhook, by the webhook's id."""
        with self._database.read() as tx:
            return last_deliveries(tx)

    def enable(self, name_or_id: str, *, is_enabled: bool) -> WebhookRow:
        """Enable or disable a webhook. Raises NotFound, and Conflict for one of the operator's or of a newer
        release."""
        row = self.find(name_or_id)
        if row.source == OPERATOR:
            raise Conflict(f"{row.name} is in the service's settings (SHARDYARD_WEBHOOKS); set `enabled` there")
        if (options := read_options(row)) is None:
            raise Conflict(f"{row.name} was added by a newer release, which alone can change it")
        changed_row = replace(row, options=_options_text(options.model_copy(update={"enabled": is_enabled})))
        with self._database.write() as tx:
            replace_webhook(tx, changed_row)
        log.info("changed a webhook", webhook=row.name, is_enabled=is_enabled)
        return changed_row

    def remove(self, name_or_id: str) -> WebhookRow:
        """Delete a webhook, its pending deliveries and its log. Raises NotFound, and Conflict for one of the
        operator's."""
        row = self.find(name_or_id)
        if row.source == OPERATOR:
            raise Conflict(f"{row.name} is in the service's settings (SHARDYARD_WEBHOOKS); remove it there")
        with self._database.write() as tx:
            delete_webhook(tx, row.id)
        log.info("removed a webhook", webhook=row.name)
        return row

    def test(self, name_or_id: str) -> DeliveryRow:
        """Send a test once, now, and return its delivery, which says how it ended. Raises NotFound."""
        row = self.find(name_or_id)
        options = read_options(row) or WebhookOptions()
        time_us = now_us()
        body = body_of(options, TEST, time_us, {"webhook": row.name})
        delivery_id = new_delivery_id()
        content = body.encode()
        attempt = asyncio.run(self._sender.send(row.url, attempt_headers(row, delivery_id, content), content))
        with self._database.write() as tx:
            insert_deliveries(
                tx,
                [
                    {
                        "id": delivery_id, "webhook_id": row.id, "type": TEST, "job_id": None, "body": body,
                        "created_at": time_us, "queued_at": time_us, "due_at": time_us, "finished_at": now_us(),
                        "state": DELIVERED if attempt.is_delivered else FAILED, "attempts": 1,
                        "last_attempt": to_text(attempt),
                    }
                ],
            )  # fmt: skip
            delivery = find_delivery(tx, row.id, delivery_id)
        assert delivery is not None
        return delivery

    def deliveries(
        self, name_or_id: str, *, state: str | None, before: int | None, limit: int
    ) -> list[DeliverySummary]:
        """Deliveries, newest first. Raises NotFound."""
        row = self.find(name_or_id)
        with self._database.read() as tx:
            return list_deliveries(tx, row.id, state=state, before=before, limit=limit)

    def delivery(self, name_or_id: str, delivery_id: str) -> DeliveryRow:
        """Raises NotFound."""
        row = self.find(name_or_id)
        with self._database.read() as tx:
            delivery = find_delivery(tx, row.id, delivery_id)
        if delivery is None:
            raise NotFound(f"{row.name} has no delivery {delivery_id[:100]!r}, or no longer")
        return delivery

    def repeat(self, name_or_id: str, delivery_id: str) -> DeliveryRow:
        """Queue a delivery again, with the same id and body. Raises NotFound, and Conflict for one that is being
        sent."""
        delivery = self.delivery(name_or_id, delivery_id)
        time_us = now_us()
        values = {"state": PENDING, "due_at": time_us, "queued_at": time_us, "finished_at": None}
        with self._database.write() as tx:
            if not change_delivery(tx, delivery.number, delivery.attempts, **values):
                raise Conflict(f"{delivery.id} is being sent at this moment")
        return replace(delivery, state=PENDING, due_at=time_us, queued_at=time_us, finished_at=None)

    def set_operators(self, specs: Sequence[WebhookSpec], owner: str) -> None:
        """Replace the operator's stored webhooks by those of the settings, matched by name. Secrets that the settings
        do not set are retained. Raises Conflict for a name that a user's webhook has."""
        try:
            self._set_operators(specs, owner)
        except WriteConflict:  # another control plane, started at the same time, has stored them
            self._set_operators(specs, owner)

    def _set_operators(self, specs: Sequence[WebhookSpec], owner: str) -> None:
        with self._database.write() as tx:
            rows_by_name = {row.name: row for row in list_webhooks(tx)}
            for name in {row.name for row in rows_by_name.values() if row.source == OPERATOR} - {
                spec.name for spec in specs
            }:
                delete_webhook(tx, rows_by_name[name].id)
            for spec in specs:
                row = _row_of(spec, owner, OPERATOR)
                if (other := rows_by_name.get(spec.name)) is None:
                    insert_webhook(tx, row)
                elif other.source != OPERATOR:
                    raise Conflict(f"SHARDYARD_WEBHOOKS names {spec.name}, which a user's webhook is called; rename it")
                else:
                    secret = other.secret if spec.secret is None else row.secret
                    replace_webhook(tx, replace(row, id=other.id, secret=secret, created_at=other.created_at))


def _row_of(spec: WebhookSpec, owner: str, source: str) -> WebhookRow:
    secret = new_secret() if spec.secret is None else spec.secret.get_secret_value()
    id = "wh-" + base64.b32encode(secrets.token_bytes(10)).decode().lower()[:12]
    return WebhookRow(id, spec.name, owner, source, spec.url, secret, _options_text(spec.options), now_us())


def _options_text(options: WebhookOptions) -> str:
    """JSON of options, which releases without `enabled` read unless it is false."""
    return options.model_dump_json(exclude={"enabled"} if options.enabled else None)
