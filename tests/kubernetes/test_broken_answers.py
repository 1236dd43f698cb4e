"""Answers that no API server gives: of a proxy, a login page or a broken network."""

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from service.control.kubernetes import Connection, KubernetesApi, connection, watch
from service.control.kubernetes.errors import Forbidden, Unavailable
from service.control.kubernetes.resource import RAY_JOBS
from service.control.kubernetes.retry import RetryPolicy
from tests.kubernetes.certificate import write_certificate


@contextmanager
def api_of(folder: Path, body: bytes, *, code: int = 200, drip_s: float = 0.0) -> Iterator[KubernetesApi]:
    """Client of a server that answers every request so, or a byte at a time."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for part in [body[i : i + 1] for i in range(len(body))] if drip_s else [body]:
                try:
                    self.wfile.write(part)
                except OSError:  # the client has given up
                    return
                time.sleep(drip_s)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        path = folder / "kubeconfig"
        entries = {"clusters": {"cluster": {"server": f"http://127.0.0.1:{server.server_port}"}},
                   "users": {"user": {}}, "contexts": {"context": {"cluster": "t", "user": "t"}}}  # fmt: skip
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "t"}
        path.write_text(json.dumps(config | {key: [{"name": "t", **entry}] for key, entry in entries.items()}))
        api = KubernetesApi(Connection.open(path), timeout_s=1, retry=RetryPolicy(attempts=1))
        with closing(api):
            yield api
        server.shutdown()


BROKEN = [b"<html>log in</html>", b"[1]", b"[" * 100_000, b'{"items": []}', b'{"metadata": [], "items": []}',
          b'{"metadata": {"resourceVersion": "1"}, "items": {}}',
          b'{"metadata": {"resourceVersion": "1"}, "items": [1]}']  # fmt: skip


@pytest.mark.parametrize("body", BROKEN, ids=[body[:24].decode() for body in BROKEN])
def test_a_list_that_is_none(tmp_path: Path, body: bytes) -> None:
    with api_of(tmp_path, body) as api, pytest.raises(Unavailable):
        api.list_page(RAY_JOBS)


@pytest.mark.parametrize("body", [b"<html>log in</html>\n", b"[1]\n", b'{"type": "ADDED"}\n', b"[" * 100_000 + b"\n",
                                  b'{"type": "ADDED", "object": 1}\n'])  # fmt: skip
def test_a_watch_that_is_none(tmp_path: Path, body: bytes) -> None:
    with api_of(tmp_path, body) as api, pytest.raises(Unavailable):
        list(api.watch(RAY_JOBS, "1"))


def test_an_object_that_is_none(tmp_path: Path) -> None:
    with api_of(tmp_path, b"<html>log in</html>") as api, pytest.raises(Unavailable):
        api.get(RAY_JOBS, "a")


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    with api_of(tmp_path, b"", code=302) as api, pytest.raises(Unavailable):
        api.list_page(RAY_JOBS)


def test_a_response_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left after a limit, which is lowered here: a response of 256 MiB would take seconds."""
    monkeypatch.setattr(connection, "MAX_RESPONSE_BYTES", 1 << 20)
    monkeypatch.setattr(watch, "MAX_EVENT_BYTES", 1 << 20)
    with api_of(tmp_path, b"x" * (3 << 20)) as api:
        with pytest.raises(Unavailable, match="longer than 1 MiB"):
            api.get(RAY_JOBS, "a")
        with pytest.raises(Unavailable, match="longer than 1 MiB"):
            list(api.watch(RAY_JOBS, "1"))


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_refused_token_is_read_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool) -> None:
    """The kubelet replaces the file between its reading and the request."""
    certificate, key = write_certificate(tmp_path)
    token = tmp_path / "token"
    tokens: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers["Authorization"])
            body = b'{"metadata": {"resourceVersion": "1"}, "items": []}'
            self.send_response(200 if tokens[-1] == "Bearer new" else 401)
            self.send_header("Content-Length", str(len(body)))
            if is_replaced:
                token.write_text("new")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    token.write_text("old")
    (tmp_path / "namespace").write_text("shardyard")
    (tmp_path / "ca.crt").write_text(certificate.read_text())
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
        refusal = pytest.raises(Forbidden, match="does not accept the credentials")
        api = KubernetesApi(Connection.open(service_account=tmp_path), timeout_s=5)
        with closing(api), nullcontext() if is_replaced else refusal:
            api.list_page(RAY_JOBS)
        server.shutdown()
    assert tokens == ["Bearer old", "Bearer new" if is_replaced else "Bearer old"]


def test_a_slow_body_ends_at_the_deadline(tmp_path: Path) -> None:
    with api_of(tmp_path, b" " * 1000, drip_s=0.1) as api, pytest.raises(Unavailable, match="within 1 s"):
        api.get(RAY_JOBS, "a")
