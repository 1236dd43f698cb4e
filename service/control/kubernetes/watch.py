"""Stream of changes of one collection."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from urllib3.exceptions import HTTPError

from service.control.kubernetes.errors import Unavailable, from_status
from service.control.kubernetes.resource import Object, Resource

if TYPE_CHECKING:
    from urllib3.response import BaseHTTPResponse

_READ_BYTES = 1 << 16
MAX_EVENT_BYTES = 1 << 23
"""Longest event: an object of etcd's limit, 1.5 MiB, and some."""


@dataclass(frozen=True)
class WatchEvent:
    """A change of one object, or a bookmark, which carries a version alone."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Object

    @property
    def resource_version(self) -> str:
        return str(self.object["metadata"]["resourceVersion"])


class Watch:
    """An open watch. Iteration ends when the server ends the stream or another thread closes it."""

    def __init__(self, response: "BaseHTTPResponse", resource: Resource) -> None:
        self._response, self._resource = response, resource
        self._lock = threading.Lock()
        self._closed = False

    def __iter__(self) -> Iterator[WatchEvent]:
        """Events in order. Raises Gone if the server dropped the version, Unavailable if the stream broke off."""
        partial_line = b""
        try:
            for chunk in self._response.stream(_READ_BYTES):
                *lines, partial_line = (partial_line + chunk).split(b"\n")
                yield from (self._parse(line) for line in lines if line.strip())
                if len(partial_line) > MAX_EVENT_BYTES:
                    raise ValueError(f"an event is longer than {MAX_EVENT_BYTES >> 20} MiB")
        except (HTTPError, OSError, ValueError) as error:
            if not self._closed:
                raise Unavailable(f"the watch of {self._resource.name} broke off: {error}") from error
        finally:
            with self._lock:
                self._closed = True
            self._response.close()

    def _parse(self, line: bytes) -> WatchEvent:
        try:
            event = json.loads(line)
            kind, value = event["type"], event["object"]
            is_event = kind == "ERROR" or "resourceVersion" in value["metadata"]
        except (KeyError, TypeError, RecursionError):
            is_event = False
        if not is_event:
            raise ValueError(f"{line[:80]!r} is no event")
        if kind == "ERROR":
            status = value
            code = int(status.get("code") or 500)
            raise from_status(code, status, verb="watch", resource=self._resource.name, retry_after_s=None)
        return WatchEvent(kind, value)

    def close(self) -> None:
        """End the iteration, also in another thread that waits for an event."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._response.shutdown()
            except (OSError, RuntimeError, ValueError):
                self._response.close()
