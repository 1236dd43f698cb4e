"""Requests on threads of their own, for a caller that must not wait for a server that hangs."""

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from service.control.kubernetes.errors import Unavailable

WAIT_S = 0.5
"""Longest wait for a response. API servers answer in tens of milliseconds, with webhooks in hundreds."""
MAX_PENDING_OF_VERB = 4
"""Maximum number of requests of a verb without a response: a webhook that hangs holds up its own verb only."""
KEEP_S = 10.0
"""Time for which a response is retained that arrived after its caller stopped waiting."""

T = TypeVar("T")


@dataclass
class _Pending:
    started_at: float
    outcome: Future[Any] = field(default_factory=Future)
    ended_at: float | None = None
    is_awaited: bool = True
    """False once its caller has stopped waiting."""

    def is_overdue(self, now_s: float, wait_s: float) -> bool:
        return self.ended_at is None and now_s - self.started_at >= wait_s


class PendingRequests:
    """Requests of which a caller waits for the response for a moment; a later call of the same verb and name gets it.

    While one is overdue, nothing is waited for: a server that hangs costs its caller one wait. Thread-safe.
    """

    def __init__(self, wake: Callable[[], None], wait_s: float = WAIT_S) -> None:
        """`wake` is called, on another thread, when a response has arrived that its caller did not wait for."""
        self._wake, self._wait_s = wake, wait_s
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, str], _Pending] = {}

    def response(self, verb: str, name: str, request: Callable[[], T]) -> T:
        """Response of `request`, or of the pending one of this verb and name, and raises as that did. Raises
        Unavailable while there is none."""
        with self._lock:
            pending = self._find_or_start(verb, name, request)
            now_s = time.monotonic()
            is_overdue = any(entry.is_overdue(now_s, self._wait_s) for entry in self._pending.values())
        futures.wait((pending.outcome,), 0.0 if is_overdue else self._wait_s)
        with self._lock:
            if pending.ended_at is None:
                pending.is_awaited = False
                raise Unavailable(f"the API server has not answered the request to {verb} {name} yet")
            self._pending.pop((verb, name), None)
        return cast(T, pending.outcome.result())

    def is_pending(self, verb: str, name: str) -> bool:
        """Whether a request has no response yet, so that it may still have an effect."""
        with self._lock:
            pending = self._pending.get((verb, name))
            return pending is not None and pending.ended_at is None

    def _find_or_start(self, verb: str, name: str, request: Callable[[], Any]) -> _Pending:
        now_s = time.monotonic()
        for key, entry in list(self._pending.items()):
            if entry.ended_at is not None and now_s - entry.ended_at > KEEP_S:
                del self._pending[key]
        if (pending := self._pending.get((verb, name))) is not None:
            return pending
        num_pending = sum(key[0] == verb and entry.ended_at is None for key, entry in self._pending.items())
        if num_pending >= MAX_PENDING_OF_VERB:
            raise Unavailable(f"the API server has not answered {num_pending} requests to {verb} objects yet")
        pending = self._pending[verb, name] = _Pending(now_s)
        threading.Thread(target=self._send, args=(pending, request), name=f"{verb} {name}", daemon=True).start()
        return pending

    def _send(self, pending: _Pending, request: Callable[[], Any]) -> None:
        response, error = None, None
        try:
            response = request()
        except BaseException as caught:  # raised by the caller that gets it
            error = caught
        with self._lock:
            pending.ended_at = time.monotonic()
            if error is None:
                pending.outcome.set_result(response)
            else:
                pending.outcome.set_exception(error)
            is_awaited = pending.is_awaited
        if not is_awaited:
            self._wake()
