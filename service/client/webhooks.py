"""Webhooks of a control plane, as a client sees them."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from service.client.connection import ServiceConnection

PAGE_SIZE = 200
TEST_TIMEOUT_S = 120.0
"""Longest wait for the outcome of a test, which the service bounds."""


class Webhooks:
    """Adds, tests and removes webhooks. A webhook is named by its name or id."""

    def __init__(self, connection: ServiceConnection) -> None:
        self._connection = connection

    def add(self, name: str, url: str, **options: Any) -> dict[str, Any]:
        """Add a webhook; only this answer has its `secret`. `options`: `format`, `events`, `states`, `labels`, `jobs`,
        `secret`."""
        return dict(self._connection.post("/v1/webhooks", {"name": name, "url": url, **options}))

    def list(self) -> list[dict[str, Any]]:
        return list(self._connection.get("/v1/webhooks")["items"])

    def remove(self, webhook: str) -> dict[str, Any]:
        """Remove a webhook with its log. Raises ApiError (404), and (409) for one of the operator's."""
        return dict(self._connection.delete(_path(webhook)))

    def enable(self, webhook: str) -> dict[str, Any]:
        """Have a disabled webhook get events again. Raises ApiError (409) for one of the operator's."""
        return dict(self._connection.post(_path(webhook, "/enable")))

    def disable(self, webhook: str) -> dict[str, Any]:
        """Stop a webhook's events until it is enabled. Raises ApiError (409) for one of the operator's."""
        return dict(self._connection.post(_path(webhook, "/disable")))

    def test(self, webhook: str) -> dict[str, Any]:
        """Send a test now; its `state` is `delivered` or `failed`."""
        return dict(self._connection.post(_path(webhook, "/test"), timeout_s=TEST_TIMEOUT_S))

    def deliveries(self, webhook: str, state: str | None = None, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Deliveries, newest first. Fetched in pages."""
        left, cursor = limit, None
        while left is None or left > 0:
            page_size = PAGE_SIZE if left is None else min(left, PAGE_SIZE)
            page = self._connection.get(_path(webhook, "/deliveries"), state=state, limit=page_size, cursor=cursor)
            yield from page["items"][:left]
            cursor = page.get("next_cursor")
            if not cursor:
                return
            left = None if left is None else left - len(page["items"])

    def delivery(self, webhook: str, delivery: str) -> dict[str, Any]:
        """A delivery with its `body`."""
        return dict(self._connection.get(_path(webhook, f"/deliveries/{quote(delivery, safe='')}")))

    def repeat(self, webhook: str, delivery: str) -> dict[str, Any]:
        """Send a delivery again, with the same id and body."""
        return dict(self._connection.post(_path(webhook, f"/deliveries/{quote(delivery, safe='')}/repeat")))


def _path(webhook: str, part: str = "") -> str:
    return f"/v1/webhooks/{quote(webhook, safe='')}{part}"
