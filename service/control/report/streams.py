"""Streams of a job's events, from any event on, until the job has ended."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from itertools import accumulate
from time import monotonic

from starlette.concurrency import run_in_threadpool

from service.control.report.event_text import WireEvent, to_wire
from service.control.report.hub import Hub
from service.control.store.database import Database
from service.control.store.events import events_after
from service.control.store.jobs import JobReference, JobSummary, get_summary

PAGE_EVENTS = 100
PAGE_CHARACTERS = 1_000_000
"""Maximum number of characters that one stream holds, plus one event."""


_SLICE_S = 0.5
"""Longest wait of a pausing stream for the end of this service."""


class EventStreams:
    """Opens streams. Slow ones read the store in pages; nothing is queued for them."""

    def __init__(self, database: Database, hub: Hub, final_states: Collection[str], ping_s: float) -> None:
        self._database, self._hub = database, hub
        self._final_states, self._ping_s = frozenset(final_states), ping_s

    async def follow(
        self, job: JobReference, last_id: int, interval_s: float = 0.0
    ) -> AsyncIterator[Sequence[WireEvent]]:
        """Every event after `last_id`, in portions; new ones at most every `interval_s`. While idle, yields empty
        portions to detect dead clients. Ends early before deleted events: a reconnecting client gets the reason."""
        with self._hub.follow(job.id) as tail:
            must_read_store = True
            while not self._hub.is_closed:
                version = tail.version
                news: Sequence[WireEvent] | None = tail.after(last_id)
                if news is None or (not news and must_read_store):
                    # No events in memory: read the store, since another process may have written.
                    news = await self._read_events(job.number, last_id)
                    if news and news[0].id != last_id + 1:
                        return
                    if not news and must_read_store:
                        if await self._has_ended(job.id, last_id):
                            return
                        must_read_store = False
                if news:
                    yield news
                    last_id = news[-1].id
                    must_read_store |= any(event.kind == "state" for event in news)  # perhaps the last
                    if interval_s and len(news) < PAGE_EVENTS:
                        await self._pause(interval_s)
                elif not await tail.news(version, self._ping_s):
                    yield ()
                    must_read_store = True

    async def _pause(self, interval_s: float) -> None:
        """Wait for `interval_s`, or until this service ends."""
        until = monotonic() + interval_s
        while not self._hub.is_closed and (remaining_s := until - monotonic()) > 0:
            await asyncio.sleep(min(remaining_s, _SLICE_S))

    async def _read_events(self, number: int, last_id: int) -> Sequence[WireEvent]:
        return await run_in_threadpool(self._read, number, last_id)

    def _read(self, number: int, last_id: int) -> list[WireEvent]:
        with self._database.read() as tx:
            rows = events_after(tx, number, last_id, PAGE_EVENTS)
        before = accumulate((len(row.data) for row in rows), initial=0)
        return [
            to_wire(row)
            for index, (row, characters) in enumerate(zip(rows, before, strict=False))
            if characters <= PAGE_CHARACTERS and row.id == rows[0].id + index
        ]

    async def _has_ended(self, job_id: str, last_id: int) -> bool:
        def read() -> JobSummary | None:
            with self._database.read() as tx:
                return get_summary(tx, job_id)

        job = await run_in_threadpool(read)
        return job is None or (job.state in self._final_states and job.last_event_id <= last_id)
