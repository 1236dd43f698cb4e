"""A sweep as seen by a client."""

import time
from typing import Any
from urllib.parse import quote

from service.client.connection import ServiceConnection
from service.client.errors import ApiError, ClientError
from service.wire.states import STUCK

POLL_INTERVAL_S = 0.5
RUNNING, SUCCEEDED = "running", "succeeded"


class Sweep:
    """A sweep at a control plane, with its last known data."""

    def __init__(self, connection: ServiceConnection, data: dict[str, Any]) -> None:
        self._connection, self._data = connection, data

    @property
    def data(self) -> dict[str, Any]:
        """Response of `GET /v1/sweeps/{id}` at the last refresh."""
        return self._data

    @property
    def id(self) -> str:
        return str(self._data["id"])

    @property
    def state(self) -> str:
        return str(self._data["state"])

    @property
    def reason(self) -> str:
        return str(self._data["reason"])

    @property
    def ended(self) -> bool:
        return self.state != RUNNING

    @property
    def members(self) -> list[dict[str, Any]]:
        """Jobs with their values and results, the best first."""
        return list(self._data["members"])

    def refresh(self) -> "Sweep":
        """Fetch its data. Raises ApiError (404, or 410 once it is deleted)."""
        self._data = self._connection.get(self._path())
        return self

    def cancel(self) -> "Sweep":
        """Request the end of all members. Raises ApiError (409) if it has ended."""
        self._data = self._connection.post(self._path("/cancel"))
        return self

    def delete(self) -> None:
        """Delete the sweep with all its jobs, and wait until done. Raises ApiError (409) while a job of it may run,
        ClientError if something cannot be removed (the control plane retries)."""
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

    def __repr__(self) -> str:
        return f"Sweep({self.id!r}, {self._data.get('state', 'unknown')})"

    def _path(self, part: str = "") -> str:
        return f"/v1/sweeps/{quote(self.id, safe='')}{part}"
