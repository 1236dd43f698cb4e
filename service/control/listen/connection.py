"""A connection: uvicorn's, with timeouts, and counted by `Connections`."""

import asyncio
import fcntl
import sys
import termios
from typing import Any, cast

import h11
import structlog
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from service.control.api.problems import problem_response
from service.control.listen.connections import Connections, address_of

log = structlog.get_logger(__name__)


class ClientConnection(asyncio.Protocol):
    """Passes bytes to uvicorn, and closes slow connections. Requests find it as `scope["state"]["connection"]`, and
    admit it once authenticated."""

    def __init__(
        self,
        connections: "Connections[ClientConnection]",
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._connections, self._limits = connections, connections.limits
        self._loop = _loop or asyncio.get_running_loop()
        self._http = H11Protocol(config, server_state, {**app_state, "connection": self}, self._loop)
        self._awaits: str | None = "headers"
        """Part of a request still to come: `headers`, `body` or None."""
        self._since = self._loop.time()
        self._num_bytes = 0
        self._unsent_bytes, self._unsent_since = 0, self._since
        self._is_refused = False
        self.address = ""

    @property
    def answering(self) -> bool:
        """Whether a response is being sent, to a client that reads it."""
        cycle = self._http.cycle
        return cycle is not None and not cycle.response_complete and not self._http.flow.write_paused

    def admit(self) -> None:
        """Count the connection as authenticated. Raises Unavailable if there are too many."""
        self._connections.admit(self)

    def close_for_another(self) -> None:
        self._end(503, "was closed for a newer one", "too many unauthenticated connections are open")

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.address = address_of((transport.get_extra_info("peername") or ("local",))[0])
        if self._connections.add(self):
            self._http.connection_made(self._transport)
            return
        self._is_refused = True
        self._end(503, "was refused", "too many unauthenticated requests are in progress")

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_bytes += len(data)
        self._http.data_received(data)
        self._note(got_data=True)

    def eof_received(self) -> None:
        if not self._is_refused:
            self._http.eof_received()

    def pause_writing(self) -> None:
        if not self._is_refused:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if not self._is_refused:
            self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.forget(self)
        if not self._is_refused:
            self._http.connection_lost(exc)

    # Timeouts

    def look(self) -> None:
        """Close the connection if a timeout has passed."""
        now_s = self._loop.time()
        self._note(got_data=False)
        self._look_at_what_is_unsent(now_s)
        if self._transport.is_closing():
            return
        waited_s = now_s - self._since
        if self._awaits == "headers" and waited_s > self._limits.header_timeout_s:
            self._end(408, "was too slow", f"headers were incomplete after {waited_s:.0f} s")
        elif self._awaits == "body" and waited_s > self._body_time_s():
            self._end(408, "was too slow", f"{self._num_bytes:,} bytes of a body arrived in {waited_s:.0f} s")

    def _note(self, got_data: bool) -> None:
        """Update which part the client must send next, and since when."""
        state = self._http.conn.their_state
        if state is h11.SEND_BODY:
            awaits = "body"
        elif state is h11.IDLE and (got_data or self._awaits == "headers"):
            awaits = "headers"
        else:
            awaits = None  # it waits for a response, or is idle, which uvicorn times out
        # The client's time does not run while reading is paused.
        if awaits != self._awaits or self._http.flow.read_paused:
            self._awaits, self._since, self._num_bytes = awaits, self._loop.time(), 0

    def _body_time_s(self) -> float:
        """Timeout of a body; grows with the bytes received, while it is still being read."""
        earned_s = self._num_bytes / self._limits.min_body_bytes_per_s if self.answering else 0.0
        return self._limits.body_timeout_s + earned_s

    def _look_at_what_is_unsent(self, now_s: float) -> None:
        unsent_bytes = self._transport.get_write_buffer_size() + unsent_by_kernel(self._transport)
        waits = self._http.flow.write_paused or self._transport.is_closing()  # nothing is added
        if unsent_bytes == 0 or unsent_bytes < self._unsent_bytes or not waits:
            self._unsent_since = now_s
        elif now_s - self._unsent_since > self._limits.write_timeout_s:
            self._tell("did not read its response")
            self._transport.abort()
        self._unsent_bytes = unsent_bytes

    def _end(self, status: int, description: str, detail: str) -> None:
        """Close the connection; a begun request gets a problem response."""
        self._tell(description)
        if self._is_refused or (self._request_begun() and not self._answer_begun()):
            answer = problem_response(
                status, {408: "too-slow", 503: "unavailable"}[status], detail, headers={"connection": "close"}
            )
            head = [b"HTTP/1.1 %d %s" % (status, {408: b"Request Timeout", 503: b"Service Unavailable"}[status])]
            head += [b"%s: %s" % header for header in answer.raw_headers]
            self._transport.write(b"\r\n".join([*head, b"", bytes(answer.body)]))
        if not self._is_refused and self._http.flow.write_paused:
            self._transport.abort()  # closing would wait until the client takes the rest
        else:
            self._transport.close()

    def _request_begun(self) -> bool:
        return self._awaits == "body" or (self._awaits == "headers" and self._num_bytes > 0)

    def _answer_begun(self) -> bool:
        return self.answering and self._http.cycle.response_started

    def _tell(self, description: str) -> None:
        log.warning(f"a connection {description}", address=self.address)


def unsent_by_kernel(transport: asyncio.BaseTransport) -> int:
    """Unacknowledged bytes in the kernel's send buffer; 0 if unknown."""
    connection = transport.get_extra_info("socket")
    if connection is None or not sys.platform.startswith("linux"):
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:  # closed by now
        return 0
