"""HTTP to a control plane: responses become plain data or a `ClientError`."""

import ipaddress
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from service.client.errors import ApiError, BadToken, BadUrl, NotShardyard, Unreachable

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class FilePart:
    """Rest of a file that is being downloaded."""

    offset: int
    """Place of its first byte in the file."""
    version: str | None
    """ETag of the file."""
    chunks: Iterator[bytes]


class ServiceConnection:
    """Requests to `url`, with the token if there is one. Thread-safe."""

    def __init__(self, url: str, token: str | None = None) -> None:
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL:
            parts = httpx.URL()
        if parts.scheme not in ("http", "https") or not parts.host:
            raise BadUrl(f"{url!r} is not a control plane's URL; use one like http://127.0.0.1:8321")
        if token and not (token.isascii() and token.isprintable() and token == token.strip()):
            raise BadToken(
                "SHARDYARD_TOKEN must be printable ASCII without surrounding spaces; use the token "
                "that the control plane was started with"
            )
        self.url = url.rstrip("/")
        loopback = _is_loopback(parts.host)
        headers = {"accept": "application/json"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=not loopback,  # a proxy cannot reach this machine's own loopback
            # Loading CA certificates is slow, and plain HTTP needs none.
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if loopback and parts.scheme == "http" else True,
        )

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, timeout_s: float = ANSWER_TIMEOUT_S, **query: Any) -> Any:
        params = {name: value for name, value in query.items() if value is not None}
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
        return self._request("GET", path, params=params, timeout=timeout)

    def post(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> Any:
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        return self._request("POST", path, json={} if body is None else body, headers=headers, timeout=timeout)

    def patch(self, path: str, content: bytes, timeout_s: float, headers: dict[str, str]) -> Any:
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        headers = {"content-type": "application/octet-stream", **headers}
        return self._request("PATCH", path, content=content, headers=headers, timeout=timeout)

    def delete(self, path: str) -> Any:
        return self._request("DELETE", path)

    @contextmanager
    def stream(
        self, path: str, headers: dict[str, str], silence_timeout_s: float, *, body: Any = None, **query: Any
    ) -> Iterator[Iterator[bytes]]:
        """Body of a long response as it arrives (POST if there is a `body`). Raises Unreachable after
        `silence_timeout_s` without data."""
        timeout = httpx.Timeout(silence_timeout_s, connect=CONNECT_TIMEOUT_S)
        method = "GET" if body is None else "POST"
        options = {"params": query, "json": body, "headers": headers, "timeout": timeout}
        with self._as_client_errors(), self._http.stream(method, path, **options) as answer:
            if answer.status_code != 200:
                answer.read()
                self._read(answer)
                raise NotShardyard(self.url, answer.status_code, answer.headers.get("content-type", ""))
            yield answer.iter_bytes()

    @contextmanager
    def download(
        self, path: str, start: int, silence_timeout_s: float, version: str | None = None
    ) -> Iterator[FilePart]:
        """A file from byte `start` on, or from its first byte if it is no longer of this `version`."""
        timeout = httpx.Timeout(silence_timeout_s, connect=CONNECT_TIMEOUT_S)
        headers = {"accept": "*/*"} | ({"range": f"bytes={start}-"} if start else {})
        if start and version:
            headers["if-range"] = version
        with (
            self._as_client_errors(),
            self._http.stream("GET", quote(path), headers=headers, timeout=timeout) as answer,
        ):
            if answer.status_code == 416 and answer.headers.get("content-range") == f"bytes */{start}":
                yield FilePart(start, version, iter(()))  # the file is complete already
                return
            if answer.status_code not in (200, 206):
                answer.read()
                self._read(answer)
                raise NotShardyard(self.url, answer.status_code, answer.headers.get("content-type", ""))
            offset = start if answer.status_code == 206 else 0
            yield FilePart(offset, answer.headers.get("etag"), answer.iter_raw())

    def _request(self, method: str, path: str, **kwargs: Any) -> Any:
        with self._as_client_errors():
            return self._read(self._http.request(method, path, **kwargs))

    def _read(self, answer: httpx.Response) -> Any:
        content_type = answer.headers.get("content-type", "").partition(";")[0].strip()
        if content_type not in ("application/json", "application/problem+json"):
            raise NotShardyard(self.url, answer.status_code, content_type)
        try:
            body = answer.json()
        except ValueError:
            raise NotShardyard(self.url, answer.status_code, f"malformed {content_type}") from None
        if answer.is_success:
            return body
        if content_type != "application/problem+json" or not isinstance(body, dict):
            raise NotShardyard(self.url, answer.status_code, content_type)
        raise ApiError.from_problem(answer.status_code, body)

    @contextmanager
    def _as_client_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise Unreachable(self.url, is_refused=True) from None
        except httpx.ConnectTimeout:
            raise Unreachable(self.url, f"no connection within {CONNECT_TIMEOUT_S:g} s", is_refused=True) from None
        except httpx.ReadTimeout as error:
            timeout_s = error.request.extensions.get("timeout", {}).get("read")
            raise Unreachable(self.url, f"no data for {timeout_s:g} s") from None
        except httpx.TransportError as error:
            raise Unreachable(self.url, f"the connection broke: {error or type(error).__name__}") from None
        except httpx.InvalidURL as error:
            raise BadUrl(f"{self.url!r} is not a control plane's URL: {error}") from None


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
