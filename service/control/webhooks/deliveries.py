"""Delivers the events in the outbox, while this control plane has the lease.

An attempt is stored before it is made. If the control plane is killed meanwhile, the attempt is repeated, so that a
receiver may get a delivery twice. Webhooks are served concurrently, with one attempt at a time for each: a slow
receiver delays only itself."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

import structlog

from service.control.errors import ServiceError
from service.control.jobs.lease import Lease, LeaseLost
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.deliveries import (
    DELIVERED,
    FAILED,
    PENDING,
    DeliveryRow,
    change_delivery,
    delete_finished,
    due_webhooks,
    next_due,
)
from service.control.store.webhooks import WebhookRow, find_webhook
from service.control.webhooks.sender import Attempt, Sender
from service.control.webhooks.signature import signed_headers

MAX_DELAY_S = 3600.0
"""Longest time between two attempts."""
JITTER = 0.1
"""Share of a delay that is random, so that deliveries that failed together are not repeated together."""
MAX_EXPONENT = 30
SWEEP_S = 60.0
SWEEP_ROWS = 1000
USER_AGENT = "Shardyard-Webhooks/1"
log = structlog.get_logger(__name__)


def attempt_headers(webhook: WebhookRow, delivery_id: str, body: bytes) -> dict[str, str]:
    """Headers of one attempt; its signature has the attempt's time."""
    return {
        "content-type": "application/json",
        "user-agent": USER_AGENT,
        **signed_headers(webhook.secret, delivery_id, int(time.time()), body),
    }


def to_text(attempt: Attempt) -> str:
    return json.dumps(asdict(attempt))


class Deliveries:
    """Delivers events in one thread, with an event loop of its own."""

    def __init__(
        self,
        database: Database,
        lease: Lease,
        sender: Sender,
        *,
        interval_s: float,
        retry_s: float,
        give_up_s: float,
        keep_days: float,
    ) -> None:
        self._database, self._lease, self._sender = database, lease, sender
        self._interval_s, self._retry_s, self._give_up_us = interval_s, retry_s, int(give_up_s * 1e6)
        self._keep_us = int(keep_days * 86_400e6)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stop = threading.Event()
        self._sweep_at = 0.0
        self._failure = ""

    def run(self) -> None:
        """Deliver until `stop`; attempts that have begun are finished."""
        asyncio.run(self._run())

    def stop(self) -> None:
        """Make `run` return; callable from any thread."""
        self._stop.set()

    async def _run(self) -> None:
        while not self._stop.is_set():
            try:
                await self.step()
                self._failure = ""
            except Exception as error:  # the next step tries again
                self._report(error)
            await asyncio.to_thread(self._stop.wait, self._interval_s)
        await self.finish()

    async def finish(self) -> None:
        """Wait until nothing more is due, or after `stop` for the attempts that have begun."""
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def step(self) -> None:
        """Start a task for every webhook with a due delivery, and remove old deliveries."""
        if not self._lease.is_held:
            return
        for webhook_id in await asyncio.to_thread(self._due):
            if webhook_id not in self._tasks:
                self._tasks[webhook_id] = asyncio.create_task(self._deliver_all(webhook_id))
        if time.monotonic() >= self._sweep_at:
            num_removed = await asyncio.to_thread(self._sweep)
            self._sweep_at = 0.0 if num_removed == SWEEP_ROWS else time.monotonic() + SWEEP_S

    async def _deliver_all(self, webhook_id: str) -> None:
        try:
            while (
                not self._stop.is_set()
                and (next_delivery := await asyncio.to_thread(self._begin, webhook_id)) is not None
            ):
                webhook, delivery = next_delivery
                body = delivery.body.encode()
                attempt = await self._sender.send(webhook.url, attempt_headers(webhook, delivery.id, body), body)
                await asyncio.to_thread(self._finish, webhook, delivery, attempt)
        except LeaseLost:
            log.warning("another control plane has taken over; this one delivers nothing more")
        except Exception as error:
            self._report(error)
        finally:
            del self._tasks[webhook_id]

    def _due(self) -> list[str]:
        with self._database.read() as tx:
            return due_webhooks(tx, now_us())

    def _begin(self, webhook_id: str) -> tuple[WebhookRow, DeliveryRow] | None:
        """Store that the next attempt of a webhook begins, and return it; None if nothing is due. Raises LeaseLost."""
        time_us = now_us()
        with self._lease.write() as tx:
            webhook, delivery = find_webhook(tx, id=webhook_id), next_due(tx, webhook_id, time_us)
            if webhook is None or delivery is None:
                return None
            attempts = delivery.attempts + 1
            due_at = time_us + int(self._delay_s(attempts) * 1e6)
            change_delivery(tx, delivery.number, delivery.attempts, attempts=attempts, due_at=due_at)
        return webhook, delivery

    def _finish(self, webhook: WebhookRow, delivery: DeliveryRow, attempt: Attempt) -> None:
        attempts, time_us = delivery.attempts + 1, now_us()
        delay_us = int(max(self._delay_s(attempts), min(attempt.retry_after_s or 0.0, MAX_DELAY_S)) * 1e6)
        gives_up = time_us + delay_us > delivery.queued_at + self._give_up_us
        state = DELIVERED if attempt.is_delivered else FAILED if gives_up else PENDING
        finished_at = None if state == PENDING else time_us
        values = {"state": state, "finished_at": finished_at, "due_at": time_us + delay_us}
        with self._database.write() as tx:
            change_delivery(tx, delivery.number, attempts, last_attempt=to_text(attempt), **values)
        if state == FAILED:
            log.warning("gave up on a delivery", webhook=webhook.name, delivery=delivery.id, error=attempt.error)

    def _delay_s(self, attempts: int) -> float:
        """Delay after this many attempts."""
        delay_s: float = min(self._retry_s * 2 ** min(attempts - 1, MAX_EXPONENT), MAX_DELAY_S)
        return delay_s * (1 + JITTER * random.random())

    def _sweep(self) -> int:
        with suppress(LeaseLost), self._lease.write() as tx:
            return delete_finished(tx, now_us() - self._keep_us, SWEEP_ROWS)
        return 0

    def _report(self, error: Exception) -> None:
        """Log an error of the store or a bug, once while it repeats."""
        if self._failure == (failure := repr(error)):
            return
        self._failure = failure
        if isinstance(error, ServiceError | LeaseLost):
            log.error("cannot deliver to webhooks; will retry", why=str(error))
        else:
            log.error("cannot deliver to webhooks; will retry", exc_info=error)


def start(deliveries: Deliveries) -> Callable[[float], None]:
    """Run it in a thread; return a function that stops it, and waits for its end up to a number of seconds."""
    thread = threading.Thread(target=deliveries.run, name="webhooks", daemon=True)
    thread.start()

    def end(timeout_s: float) -> None:
        deliveries.stop()
        thread.join(timeout_s)

    return end
