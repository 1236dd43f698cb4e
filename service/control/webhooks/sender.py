"""One attempt of a delivery: a POST with bounded time and response size."""

import asyncio
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpcore

from service.control.webhooks.addresses import AddressRefused, AddressRule, CheckedNetwork

MAX_RESPONSE_BYTES = 4096
"""Bytes of a response that are read; further ones are ignored."""
MAX_SHOWN_CHARS = 500
CLOSE_S = 1.0
"""Longest time to close a connection."""


@dataclass(frozen=True)
class Attempt:
    """Outcome of an attempt."""

    time: int
    """Microseconds since 1970 UTC."""
    duration_ms: int
    status: int | None = None
    """None without a response."""
    error: str = ""
    """Empty if it was delivered."""
    response: str = ""
    """Beginning of the response's body."""
    retry_after_s: float | None = None
    """Delay that the receiver asks for."""

    @property
    def is_delivered(self) -> bool:
        return not self.error


class Sender:
    """Sends to permitted addresses, always on a new connection; follows no redirects, and uses no proxy."""

    def __init__(self, rule: AddressRule, timeout_s: float) -> None:
        self._rule, self._timeout_s = rule, timeout_s
        self._tls: ssl.SSLContext | None = None

    async def send(self, url: str, headers: Mapping[str, str], body: bytes) -> Attempt:
        """POST a body; every failure is an attempt with an error."""
        start_us, start_s = time.time_ns() // 1000, time.monotonic()
        status, response, retry_after_s, error = None, "", None, ""
        network = CheckedNetwork(self._rule)
        try:
            status, response, retry_after_s = await self._post(network, url, headers, body)
            error = "" if 200 <= status < 300 else _refusal(status)
        except TimeoutError:
            phase = "no response" if network.is_connected else "no connection"
            error = f"{phase} within {self._timeout_s:g} s"
        except AddressRefused as refusal:
            error = str(refusal)
        except httpcore.ConnectError as failure:
            error = f"cannot connect: {failure}" if str(failure) else "cannot connect"
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as failure:
            error = f"the connection broke: {str(failure) or type(failure).__name__}"
        duration_ms = round((time.monotonic() - start_s) * 1000)
        return Attempt(start_us, duration_ms, status, error[:MAX_SHOWN_CHARS], response, retry_after_s)

    async def _post(
        self, network: CheckedNetwork, url: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, str, float | None]:
        """(status, beginning of the response, Retry-After). Raises TimeoutError, AddressRefused, httpcore's errors."""
        self._tls = self._tls or ssl.create_default_context()
        pool = httpcore.AsyncConnectionPool(self._tls, max_keepalive_connections=0, network_backend=network)
        own_headers = {"host": urlsplit(url).netloc, "content-length": str(len(body)), "connection": "close"}
        request = httpcore.Request("POST", url, headers=[*own_headers.items(), *headers.items()], content=body)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await pool.handle_async_request(request)
            response = await self._beginning(answer)
            return answer.status, response, _retry_after_s(answer)
        finally:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_S):
                    await pool.aclose()

    async def _beginning(self, answer: httpcore.Response) -> str:
        """Beginning of a response's text, as far as it arrives in time. The outcome depends on the status alone."""
        content = bytearray()
        with suppress(TimeoutError, httpcore.NetworkError, httpcore.ProtocolError):
            async with asyncio.timeout(self._timeout_s):
                async for chunk in answer.aiter_stream():
                    content += chunk
                    if len(content) >= MAX_RESPONSE_BYTES:
                        break
                await answer.aclose()
        return bytes(content[:MAX_RESPONSE_BYTES]).decode(errors="replace")[:MAX_SHOWN_CHARS]


def _refusal(status: int) -> str:
    if 300 <= status < 400:
        return f"answered {status}: redirects are not followed; use the URL that it leads to"
    return f"answered {status}"


def _retry_after_s(answer: httpcore.Response) -> float | None:
    """Seconds of a Retry-After header; None without one, or for a date."""
    for name, value in answer.headers:
        if name.lower() == b"retry-after" and value.isdigit() and len(value) <= 6:
            return float(value)
    return None
