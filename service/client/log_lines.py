"""A job's log lines, over as many connections as it takes."""

import json
import time
from collections import Counter
from collections.abc import Generator
from typing import Any

from service.client.connection import Connection
from service.client.errors import Unreachable
from service.client.sse import lines
from service.client.stream import ENDED_STATES, Patience

SILENCE_S = 300.0
"""A quiet log may be well; after so long the connection is made anew, in case it is not."""


def log_lines(
    connection: Connection, job_id: str, follow: bool, patience: Patience
) -> Generator[dict[str, Any]]:
    """Every line once, each writer's in order. Raises Unreachable, when following only after a while.

    A log has no ids, but a writer's lines never change: after a reconnect, as many of each writer are passed
    over as were handed on before.
    """
    path, headers = f"/v1/jobs/{job_id}/logs", {"accept": "application/x-ndjson"}
    handed_on: Counter[tuple[int, str]] = Counter()
    connected, away_since, pause_s = False, None, patience.first_pause_s
    while True:
        job_ended, broken = False, False
        seen: Counter[tuple[int, str]] = Counter()
        try:
            if follow:
                job_ended = connection.get(f"/v1/jobs/{job_id}")["state"] in ENDED_STATES
            with connection.stream(path, headers, SILENCE_S, follow=str(follow).lower()) as chunks:
                connected, away_since = True, None
                for raw in lines(chunks):
                    line = json.loads(raw)
                    writer = (line["attempt"], line["worker"])
                    seen[writer] += 1
                    if seen[writer] > handed_on[writer]:
                        handed_on[writer] += 1
                        pause_s = patience.first_pause_s
                        yield line
        except Unreachable:
            away_since = away_since or time.monotonic()
            if not (follow and connected) or time.monotonic() - away_since > patience.away_s:
                raise
            broken = True
        if not follow or (job_ended and not broken):
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, patience.longest_pause_s)
