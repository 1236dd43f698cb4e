"""A job's log lines, across reconnects."""

import json
import time
from collections.abc import Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from service.client.connection import ServiceConnection
from service.client.errors import Unreachable
from service.client.sse import lines
from service.client.stream import Patience
from service.wire.since import parse_since
from service.wire.states import OVER

SILENCE_S = 300.0
"""Silence after which the connection is reopened, in case it is dead."""


@dataclass(frozen=True)
class LogQuery:
    """Filters of `GET /v1/jobs/{id}/logs`; None for all."""

    tail: int | None = None
    since: str | None = None
    grep: str | None = None
    worker: str | None = None
    attempt: int | None = None
    raw: bool | None = None

    def reconnect_query(self, after_s: float, first_time: str | None) -> dict[str, Any]:
        """Query for reconnecting `after_s` after the start. With `tail`, all lines from `first_time` on (the first
        line's time), the oldest of the newest lines."""
        query = {"grep": self.grep, "worker": self.worker, "attempt": self.attempt, "raw": self.raw}
        if self.tail is not None:
            return query | ({"tail": self.tail, "since": self.since} if first_time is None else {"since": first_time})
        ago = parse_since(self.since) if self.since else None
        if isinstance(ago, timedelta):
            return query | {"since": f"{round(ago.total_seconds() + after_s) + 1}s"}
        return query | {"since": self.since}


def log_lines(
    connection: ServiceConnection, job_id: str, follow: bool, patience: Patience, query: LogQuery = LogQuery()
) -> Generator[dict[str, Any]]:
    """Every line once, each writer's in order. Raises Unreachable, while following only after a while. After a
    reconnect, lines up to the last yielded position are skipped."""
    path, headers = f"/v1/jobs/{job_id}/logs", {"accept": "application/x-ndjson"}
    handed_on = dict[tuple[int, str], list[int]]()
    began, first_time = time.monotonic(), None
    fields = dict(vars(query))
    has_connected, away_since, pause_s = False, None, patience.first_pause_s
    while True:
        job_ended, broken = False, False
        params = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in fields.items()
            if value not in (None, "")
        }
        try:
            if follow:
                job_ended = connection.get(f"/v1/jobs/{job_id}")["state"] in OVER
            with connection.stream(path, headers, SILENCE_S, follow=str(follow).lower(), **params) as chunks:
                has_connected, away_since = True, None
                for raw in lines(chunks):
                    line = json.loads(raw)
                    writer, position = (line["attempt"], line["worker"]), line.pop("position")
                    if position > handed_on.get(writer, []):
                        handed_on[writer] = position
                        first_time = first_time or line.get("time")
                        pause_s = patience.first_pause_s
                        yield line
        except Unreachable:
            away_since = away_since or time.monotonic()
            if not (follow and has_connected) or time.monotonic() - away_since > patience.away_s:
                raise
            broken = True
        if not follow or (job_ended and not broken):
            return
        fields = query.reconnect_query(time.monotonic() - began, first_time)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, patience.longest_pause_s)
