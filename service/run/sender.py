"""Delivers spooled records to the control plane in the background, and fetches requests.

While the control plane is down, records stay on the node's disk and on storage. Sending never blocks training.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from pydantic import ValidationError

from service.run.outbox import Outbox
from service.wire.events import RecordAnswer, Request
from service.wire.run_status import RunStatus

SEND_INTERVAL_S = 0.2
HEARTBEAT_S = 1.0
STATUS_INTERVAL_S = 2.0
BACK_OFF_MOST_S = 1.0
NOTHING_LEFT = -1.0
CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class Sender:
    """Sends several writers' records in order, its own process's last. The others are of dead processes, whose
    records the control plane refuses once a newer worker group has begun."""

    def __init__(self, events_url: str, job_id: str, attempt: int, token: str, outboxes: Sequence[Outbox]) -> None:
        self._url = f"{events_url.rstrip('/')}/internal/v1/jobs/{job_id}/records"
        self._attempt = attempt
        self._outboxes = list(outboxes)
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,  # proxies for the internet do not reach the control plane
        )
        for library in ("httpx", "httpcore"):
            logging.getLogger(library).setLevel(logging.WARNING)  # they log every request
        self.request: Request | None = None
        """The control plane's last request to the run."""
        self.run_status: Callable[[], RunStatus | None] = lambda: None
        """Returns the attempt's status, every few seconds; the driver sets it."""
        self.driver_silent_s: Callable[[], float] | None = None
        """Seconds since the driver last answered this process; the first worker sets it."""
        self._status_at = 0.0
        self._is_reached = False
        self._posted_at, self._back_off_s = 0.0, SEND_INTERVAL_S
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._give_up_at = float("inf")

    def start(self) -> None:
        self._thread.start()

    def close(self, patience_s: float) -> bool:
        """Send the rest and end, within about `patience_s`; returns whether all was delivered. An unreachable
        control plane is not waited for."""
        self._give_up_at = time.monotonic() + patience_s
        self._ending.set()
        self._thread.join(patience_s + CONNECT_TIMEOUT_S)
        return all(not outbox.is_refused and not outbox.batch() for outbox in self._outboxes)

    def _run(self) -> None:
        wait_s = 0.0
        while True:
            ending = self._ending.wait(wait_s)
            if time.monotonic() > self._give_up_at:
                break
            try:
                wait_s = self._round(ending)
            except OSError as error:
                self._note_unreachable(f"cannot read its records: {error}")
                wait_s = BACK_OFF_MOST_S
            if ending:
                if wait_s == NOTHING_LEFT or not self._is_reached:
                    break
                time.sleep(wait_s)  # the next `wait` returns at once
        self._client.close()

    def _round(self, ending: bool) -> float:
        """Send a batch, or a due heartbeat; returns the wait before the next round."""
        outbox = next((outbox for outbox in self._outboxes if not outbox.is_refused and outbox.batch()), None)
        if outbox is None and ending:
            return NOTHING_LEFT
        outbox = outbox or self._outboxes[-1]
        lines = [] if outbox.is_refused else outbox.batch()
        if not lines and (outbox.is_refused or time.monotonic() - self._posted_at < HEARTBEAT_S):
            return SEND_INTERVAL_S
        self._posted_at = time.monotonic()
        if not self._post(outbox, lines):
            self._back_off_s = min(BACK_OFF_MOST_S, self._back_off_s * 2)
            return self._back_off_s
        self._back_off_s = SEND_INTERVAL_S
        has_more = len(lines) > 1 and not outbox.is_refused and bool(outbox.batch())
        return 0.0 if has_more else SEND_INTERVAL_S

    def _post(self, outbox: Outbox, lines: list[bytes]) -> bool:
        """Send a batch; False if the control plane could not answer now."""
        head = {
            "attempt": self._attempt,
            "writer": outbox.writer,
            "first_seq": outbox.next_seq,
            **self._status(),
            **({} if self.driver_silent_s is None else {"driver_silent_s": round(self.driver_silent_s(), 1)}),
        }
        body = b'%s,"records":[%s]}' % (json.dumps(head).encode()[:-1], b",".join(lines))
        try:
            response = self._client.post(self._url, content=body)
        except httpx.HTTPError as error:
            self._note_unreachable(str(error) or type(error).__name__)
            return False
        if response.status_code in (200, 409):
            try:
                answer = RecordAnswer.model_validate_json(response.content)
            except ValidationError:
                self._note_unreachable(f"malformed response: {response.text[:200]}")
                return False
            if not self._is_reached:
                _log.info("delivering records to %s", self._url)
            self._is_reached, self.request = True, answer.request
            if response.status_code == 200:
                outbox.acknowledge(lines, answer.next_seq)
            else:
                outbox.seek(answer.next_seq)
            return True
        # 404: a control plane that lost its store does not know the job until it is recovered from storage.
        if response.status_code >= 500 or response.status_code in (404, 408, 429):
            self._note_unreachable(f"status {response.status_code}")
            return False
        # 403: a newer attempt or group has taken over. Other 4xx errors would only be repeated.
        outbox.is_refused = True
        if response.status_code == 403 and _is_end_response(response):
            self.request = "cancel"
        _log.warning("%s: the control plane refuses its records (%d): %s; they stay in storage",
                     outbox.writer, response.status_code, response.text[:300])  # fmt: skip
        return True

    def _status(self) -> dict[str, Any]:
        if time.monotonic() - self._status_at < STATUS_INTERVAL_S:
            return {}
        self._status_at = time.monotonic()
        try:
            status = self.run_status()
            return {} if status is None else {"run": status.model_dump(mode="json")}
        except Exception:  # a faulty status must not stop records
            _log.exception("cannot send the run's status")
            return {}

    def _note_unreachable(self, cause: str) -> None:
        if self._is_reached:
            _log.warning("the control plane does not respond (%s): records wait on this node", cause)
        self._is_reached = False


def _is_end_response(response: httpx.Response) -> bool:
    """Whether a newer attempt runs, which may need this one's resources."""
    try:
        problem = response.json()
    except ValueError:
        return False
    return isinstance(problem, dict) and problem.get("request") == "cancel"
