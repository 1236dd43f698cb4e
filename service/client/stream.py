"""A job's events as they happen, across reconnects: none lost, none duplicated."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.client.connection import ServiceConnection
from service.client.errors import ApiError, ClientError, NotShardyard, Unreachable
from service.client.sse import messages
from service.wire.states import OVER, State

if TYPE_CHECKING:
    from service.wire.events import Event


@dataclass(frozen=True)
class Patience:
    """Times for which a stream tolerates an unreachable control plane."""

    away_s: float = 300.0
    """Time without a connection after which Unreachable is raised."""
    silence_s: float = 60.0
    """Silence after which a connection counts as dead. The service pings every few seconds."""
    first_pause_s: float = 0.2
    longest_pause_s: float = 5.0


def follow(
    connection: ServiceConnection,
    job_id: str,
    last_id: int = 0,
    patience: Patience = Patience(),
    on_lost: Callable[[ClientError], None] | None = None,
) -> "Generator[Event]":
    """Every event after `last_id`, in order, until the job has ended. Reconnects with `Last-Event-ID`, and passes
    each error to `on_lost`.

    Raises Unreachable at once if the first connection fails, later only after `patience.away_s`; ApiError if the job
    is unknown or deleted (404, 410), or events after `last_id` are no longer kept (410). Closing the generator closes
    its connection.
    """
    from service.wire.events import Event

    path = f"/v1/jobs/{job_id}/events"
    away_since: float | None = None
    pause_s, has_connected, skipped_at = patience.first_pause_s, False, -1
    job_ended, newest_id = False, 0  # as known before the current connection was opened
    while True:
        before, broken = last_id, False
        try:
            headers = {"accept": "text/event-stream"} | ({"last-event-id": str(last_id)} if last_id else {})
            with connection.stream(path, headers, silence_timeout_s=patience.silence_s) as chunks:
                has_connected, away_since = True, None
                for message in messages(chunks):
                    event = Event.model_validate_json(message.data)
                    if event.id <= last_id:
                        continue  # sent again after a reconnect
                    if event.id > last_id + 1:
                        if skipped_at == last_id:
                            raise ClientError(
                                f"the event stream of {job_id} skips from {last_id} to {event.id}, twice: events are "
                                "missing in the control plane"
                            )
                        skipped_at = last_id
                        break  # ids have no gaps: request the missing events again
                    last_id = event.id
                    yield event
                    if event.kind == "state" and event.data.get("state") == State.DELETING:
                        return  # the last event: the job's records are deleted soon
            if job_ended and skipped_at != last_id and last_id >= newest_id:
                return
            job = connection.get(f"/v1/jobs/{job_id}")
            if last_id == 0 and skipped_at == 0:
                last_id = int(job.get("first_event_id", 1)) - 1  # earlier events are no longer kept
            job_ended, newest_id = job["state"] in OVER, int(job.get("last_event_id", last_id))
        except (Unreachable, NotShardyard, ApiError) as error:
            if not isinstance(error, Unreachable) and error.status < 500:
                raise
            now_s = time.monotonic()
            away_since = away_since or now_s
            if not has_connected or now_s - away_since > patience.away_s:
                raise
            broken = True
            if on_lost is not None:
                on_lost(error)
        if last_id > before:
            pause_s = patience.first_pause_s
        elif broken or not job_ended or last_id < newest_id:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, patience.longest_pause_s)
