"""A control plane of one job for tests of the client: real HTTP, with faults where a test wants them.

Other behaviour is tested against a real control plane; this one fails as a real one does only when a cable
is pulled.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

JOB_ID = "job-abcdefghijkl"


def event(id: int, kind: str = "log", attempt: int | None = 1, **data: Any) -> dict[str, Any]:
    second = f"{id // 60 % 60:02}:{id % 60:02}"
    return {
        "id": id, "kind": kind, "time": f"2026-01-31T12:{second}.000000Z", "attempt": attempt,
        "actor": "group-0", "data": data,
    }  # fmt: skip


def as_sse(event: dict[str, Any]) -> bytes:
    text = json.dumps(event, ensure_ascii=False)
    return f"id: {event['id']}\nevent: {event['kind']}\ndata: {text}\n\n".encode()


Play = Callable[["Handler", list[dict[str, Any]]], None]
"""What one connection of the event stream does with its backlog of events."""


def all_then_close(handler: "Handler", backlog: list[dict[str, Any]]) -> None:
    for entry in backlog:
        handler.send_chunk(as_sse(entry))
    handler.end_chunks()


def cut_after(num_bytes: int) -> Play:
    """Break the connection after `num_bytes` of the stream."""

    def play(handler: "Handler", backlog: list[dict[str, Any]]) -> None:
        handler.send_chunk(b"".join(as_sse(entry) for entry in backlog)[:num_bytes])
        handler.break_off()

    return play


def silence(handler: "Handler", backlog: list[dict[str, Any]]) -> None:
    """Send nothing, and keep the connection open until the server is closed."""
    handler.server.script.close_event.wait()
    handler.break_off()


@dataclass
class Script:
    """What the server knows and does. `plays` are used up in order; the last one stays."""

    events: list[dict[str, Any]] = field(default_factory=list)
    plays: list[Play] = field(default_factory=lambda: [all_then_close])
    job: dict[str, Any] = field(default_factory=dict)
    logs: list[tuple[list[dict[str, Any]], bool]] = field(default_factory=list)
    """What each connection to the log sends, and whether it then ends well; used up in order."""
    answers: dict[tuple[str, str], list[tuple[int, str, bytes]]] = field(default_factory=dict)
    """(method, path) to (status, content type, body), used up in order; the last one stays."""
    last_event_ids: list[str] = field(default_factory=list)
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    """(method, path with query, headers, body) of every request."""
    close_event: threading.Event = field(default_factory=threading.Event)

    def answer(self, method: str, path: str, status: int, body: Any, content_type: str = "") -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = content_type or ("application/json" if status < 400 else "application/problem+json")
        self.answers.setdefault((method, path), []).append((status, kind, raw))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        super().__init__(("127.0.0.1", port), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        script, parts = self.server.script, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        script.requests.append((method, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        if answers := script.answers.get((method, parts.path)):
            self._answer(*(answers.pop(0) if len(answers) > 1 else answers[0]))
        elif parts.path == f"/v1/jobs/{JOB_ID}/events":
            self._stream(parse_qs(parts.query))
        elif parts.path == f"/v1/jobs/{JOB_ID}/logs":
            self._log(*script.logs.pop(0))
        elif parts.path == f"/v1/jobs/{JOB_ID}":
            newest = max((event["id"] for event in script.events), default=0)
            job = {"id": JOB_ID, "last_event_id": newest, **script.job}
            self._answer(200, "application/json", json.dumps(job).encode())
        else:
            problem = {"title": "Not Found", "status": 404, "detail": f"there is no {parts.path}"}
            self._answer(404, "application/problem+json", json.dumps(problem).encode())

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, query: dict[str, list[str]]) -> None:
        script = self.server.script
        last = self.headers.get("last-event-id", "0")
        script.last_event_ids.append(last)
        play = script.plays.pop(0) if len(script.plays) > 1 else script.plays[0]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        play(self, [entry for entry in script.events if entry["id"] > int(last)])

    def _log(self, lines: list[dict[str, Any]], ends_well: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/x-ndjson")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for line in lines:
            self.send_chunk(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        if ends_well:
            self.end_chunks()
        else:
            self.break_off()

    def send_chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def end_chunks(self) -> None:
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def break_off(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(script: Script, port: int = 0) -> Iterator[str]:
    """The URL of a server that plays `script`."""
    server = Server(script, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        script.close_event.set()
        server.shutdown()
        server.server_close()
        thread.join()
