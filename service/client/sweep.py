"""A sweep as seen by a client."""

from typing import Any

from service.client.resource import Resource

UNFINISHED = ("running", "paused")


class Sweep(Resource):
    """A sweep at a control plane, with its last known data."""

    collection = "/v1/sweeps"

    @property
    def ended(self) -> bool:
        return self.state not in UNFINISHED

    @property
    def members(self) -> list[dict[str, Any]]:
        """Jobs with their values and results, the best first."""
        return list(self._data["members"])

    def pause(self) -> "Sweep":
        """Request the pause of all members that run; no others are started. Raises ApiError (409) if it has ended."""
        self._data = self._connection.post(self._path("/pause"))
        return self

    def resume(self) -> "Sweep":
        """Continue a paused sweep. Raises ApiError (409) if it has ended, or while a member is still pausing."""
        self._data = self._connection.post(self._path("/resume"))
        return self

    def cancel(self) -> "Sweep":
        """Request the end of all members. Raises ApiError (409) if it has ended."""
        self._data = self._connection.post(self._path("/cancel"))
        return self

    def delete(self) -> None:
        """Delete the sweep with all its jobs, and wait until done. Raises ApiError (409) while a job of it may run,
        ClientError if something cannot be removed (the control plane retries)."""
        self._delete()
