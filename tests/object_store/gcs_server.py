"""A server of Google Cloud Storage (gcp-storage-emulator's) in threads of this process, on loopback."""

import json
import threading
from functools import partial
from http.server import ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

from tests.object_store.proxy import Refusal


class _Handler(RequestHandler):
    """Adds what the emulator lacks: one request at a time on its unlocked memory, and aborted uploads."""

    lock = threading.Lock()

    def handle_one_request(self) -> None:
        with self.lock:
            super().handle_one_request()

    def do_DELETE(self) -> None:
        upload_ids = parse_qs(urlsplit(self.path).query).get("upload_id")
        if upload_ids is None:
            super().do_DELETE()
            return
        self.storage.delete_resumable_file_obj(upload_ids[0])
        self.send_response(499, "Client Closed Request")  # as the store documents it
        self.send_header("content-length", "0")
        self.end_headers()


class GcsServer:
    """A server with an empty bucket `bucket`. It keeps objects in memory."""

    scheme = "gs"
    denial, overload = Refusal(403, "forbidden"), Refusal(429, "rateLimitExceeded")
    puts = (("POST", "/upload/storage/v1/b/bucket/o"),) * 3
    """Requests that put two files of a job: a stream begins an upload, then sends its content."""

    def __init__(self) -> None:
        self._storage = Storage(use_memory_fs=True)
        create_bucket("bucket", self._storage)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self._storage))
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def list_keys(self, prefix: str = "") -> list[str]:
        """Keys of all objects in the bucket with a prefix."""
        with _Handler.lock:
            files, _ = self._storage.get_file_list("bucket", prefix=prefix)
            return [file["name"] for file in files]

    def put(self, key: str, content: bytes) -> None:
        with _Handler.lock:
            fields = {"name": key, "bucket": "bucket", "size": len(content), "timeCreated": "2026-12-01T12:00:00Z"}
            self._storage.create_file("bucket", key, content, fields)

    def delete(self, key: str) -> None:
        with _Handler.lock:
            self._storage.delete_file("bucket", key)

    def create_bucket(self, name: str) -> None:
        with _Handler.lock:
            create_bucket(name, self._storage)

    def delete_bucket(self, name: str) -> None:
        with _Handler.lock:
            self._storage.delete_bucket(name)

    def buckets(self) -> list[str]:
        return list(self._storage.buckets)

    def num_open_uploads(self) -> int:
        """Resumable uploads that were neither completed nor aborted."""
        return len(self._storage.resumable)

    def abort_uploads(self) -> None:
        with _Handler.lock:
            self._storage.resumable.clear()

    @staticmethod
    def environment(port: int) -> dict[str, str]:
        """Variables with which clients use the server, or the proxy, at a port."""
        return {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks for the kind of bucket by gRPC
        }

    @staticmethod
    def body_of(refusal: Refusal) -> bytes:
        error = {"code": refusal.status, "message": f"{refusal.code} here", "errors": [{"reason": refusal.code}]}
        return json.dumps({"error": error}).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
