"""A server that receives records by the rules of the wire, and can be away, refuse and forget."""

import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """Takes batches of one job's writers, and counts them."""

    def __init__(self) -> None:
        self.records: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.order: list[str] = []
        """Writers in the order in which their records came."""
        self.statuses: list[dict[str, Any]] = []
        self.driver_silent_s: list[float] = []
        """Silence of the driver, as workers report it with each batch."""
        self.refuses = False
        self.knows_job = True
        self.request: str | None = None
        self.num_posts = 0
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> "Receiver":
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, answer = receiver.take(body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def take(self, batch: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.num_posts += 1
            if not self.knows_job:
                return 404, {"detail": "there is no such job"}
            if self.refuses:
                return 403, {"detail": "superseded"}
            self.statuses += [batch["run"]] if batch.get("run") else []
            self.driver_silent_s += [batch["driver_silent_s"]] if "driver_silent_s" in batch else []
            records = self.records[batch["writer"]]
            if batch["first_seq"] > len(records):
                return 409, {"next_seq": len(records), "request": self.request}
            for seq, record in enumerate(batch["records"], batch["first_seq"]):
                assert record["seq"] == seq
                if seq >= len(records):
                    records.append(record)
                    self.order.append(batch["writer"])
            return 200, {"next_seq": len(records), "request": self.request}

    def steps(self, writer: str) -> list[int]:
        with self._lock:
            return [record["data"]["step"] for record in self.records[writer]]
