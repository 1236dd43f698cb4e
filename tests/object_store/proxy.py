"""A proxy before an object store's server that makes it slow or fail."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """With its query."""


@dataclass(frozen=True)
class Refusal:
    """An answer of the proxy's own."""

    status: int
    code: str
    """As the store names the error; empty to drop the connection."""


DROP = Refusal(0, "")
SLOW_DOWN = Refusal(503, "SlowDown")
EXPIRED = Refusal(403, "ExpiredToken")
FULL = Refusal(507, "XMinioStorageFull")


class Proxy:
    """Forwards requests to the server, unless `answer` refuses them; each after `delay_s`."""

    def __init__(self, port: int, body_of: Callable[[Refusal], bytes]) -> None:
        """`body_of`: body with which the server's kind of store refuses."""
        self.answer: Callable[[Request], Refusal | None] = lambda _request: None
        self.delay_s = 0.0
        self.requests: list[Request] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Tests look at `requests`."""

            def forward(self) -> None:
                content = self._content()
                request = Request(self.command, self.path)
                proxy.requests.append(request)
                time.sleep(proxy.delay_s)
                if (refusal := proxy.answer(request)) is not None:
                    self._refuse(refusal)
                    return
                connection = HTTPConnection("127.0.0.1", port, timeout=60)
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
                connection.request(self.command, self.path, content, headers)
                response = connection.getresponse()
                body = response.read()
                connection.close()
                self.send_response(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in _HOP_BY_HOP:
                        self.send_header(name, value)
                length = response.getheader("content-length") if self.command == "HEAD" else str(len(body))
                self.send_header("content-length", length or "0")
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

            def _content(self) -> bytes:
                if self.headers.get("expect", "").lower() == "100-continue":
                    self.send_response_only(100)
                    self.end_headers()
                if "chunked" not in self.headers.get("transfer-encoding", ""):
                    return self.rfile.read(int(self.headers.get("content-length", 0)))
                content = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    content += self.rfile.read(size)
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    """Trailers."""
                return content

            def _refuse(self, refusal: Refusal) -> None:
                if refusal == DROP:
                    self.close_connection = True
                    self.connection.close()
                    return
                body = body_of(refusal)
                self.send_response(refusal.status)
                self.send_header("content-type", "application/json" if body.startswith(b"{") else "application/xml")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def handle(self) -> None:
                try:
                    super().handle()
                except (ConnectionError, ValueError):
                    """The client has gone, or a dropped connection is closed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def refuse_next(self, refusal: Refusal, count: int, method: str = "") -> None:
        """Refuse as many requests, of one method if given, then forward again."""
        remaining = [refusal] * count

        def answer(request: Request) -> Refusal | None:
            return remaining.pop() if remaining and method in ("", request.method) else None

        self.answer = answer

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


_HOP_BY_HOP = frozenset({"connection", "content-length", "expect", "transfer-encoding"})
