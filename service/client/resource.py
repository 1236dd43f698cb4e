"""Data, refresh and deletion of a job or a sweep at a control plane."""

import time
from abc import ABC
from typing import Any, ClassVar, Self
from urllib.parse import quote

from service.client.connection import ServiceConnection
from service.client.errors import ApiError, ClientError
from service.wire.states import STUCK

POLL_INTERVAL_S = 0.5


class Resource(ABC):
    """A resource of the API, with its last known data."""

    collection: ClassVar[str]
    """Path of the resources of this kind."""

    def __init__(self, connection: ServiceConnection, data: dict[str, Any]) -> None:
        self._connection, self._data = connection, data

    @property
    def data(self) -> dict[str, Any]:
        """Response of its GET at the last refresh."""
        return self._data

    @property
    def id(self) -> str:
        return str(self._data["id"])

    @property
    def name(self) -> str:
        return str(self._data["name"])

    @property
    def state(self) -> str:
        return str(self._data["state"])

    @property
    def reason(self) -> str:
        return str(self._data.get("reason") or "")

    def refresh(self) -> Self:
        """Update its data from the control plane. Raises ApiError (404, or 410 once it is deleted)."""
        self._data = self._connection.get(self._path())
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {self._data.get('state', 'unknown')})"

    def _path(self, part: str = "") -> str:
        return f"{self.collection}/{quote(self.id, safe='')}{part}"

    def _delete(self) -> None:
        """Request its deletion, and wait until it is done. Raises ApiError, ClientError if something cannot be removed
        (the control plane retries)."""
        self._connection.delete(self._path())
        while True:
            try:
                self.refresh()
            except ApiError as error:
                if error.status != 410:
                    raise
                return
            if self.reason.startswith(STUCK):
                raise ClientError(f"{self.id} {self.reason}")
            time.sleep(POLL_INTERVAL_S)
