"""A receiver of webhooks on a real socket, which answers as a test says, or misbehaves."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.processes import DEADLINE_S


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def content(self) -> dict[str, Any]:
        return dict(json.loads(self.body))


class Receiver(ThreadingHTTPServer):
    """`behave` gets each request's handler and number, from 1, and answers."""

    daemon_threads = True

    def __init__(self, behave: Callable[["Handler", int], None]) -> None:
        self.behave = behave
        self.received: list[Received] = []
        self.release = threading.Event()
        """Ends handlers that wait for it."""
        super().__init__(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"

    def states(self) -> list[str]:
        """State of each event that was received, in order, with repeated ones."""
        return [request.content["data"]["state"] for request in self.received]


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.received.append(Received(self.path, headers, body))
        with suppress(OSError):  # the sender has closed the connection
            self.server.behave(self, len(self.server.received))

    do_GET = do_POST

    def answer(self, status: int, body: bytes = b"ok", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def hang(self) -> None:
        """Answer nothing."""
        self.server.release.wait(DEADLINE_S)

    def close_early(self) -> None:
        """Reset the connection."""
        self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def stream_forever(self) -> None:
        self.send_response(200)
        self.end_headers()
        while not self.server.release.is_set():
            self.wfile.write(b"x" * 1000)

    def trickle_headers(self) -> None:
        """Send a header that never ends, a byte at a time."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\nx-endless: ")
        while not self.server.release.wait(0.05):
            self.wfile.write(b"x")

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def receiver(behave: Callable[[Handler, int], None] = lambda handler, _: handler.answer(200)) -> Iterator[Receiver]:
    server = Receiver(behave)
    server.thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.thread.join()
        server.server_close()
