"""What is heard late of older attempts is marked: whatever comes when, the newest is known for what it is."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.client.job import Job
from service.client.stream import Patience
from service.control.report.event_text import to_wire
from service.control.report.history import metric_history
from service.control.report.hub import Hub
from service.control.report.ingest import Ingest
from service.control.report.tokens import TokenMint
from service.control.store.database import Database
from service.control.store.events import events_after
from service.control.store.jobs import get_job, insert_job
from service.wire.events import Event, Record

Writer = tuple[int, int]
"""(attempt, group), in the order in which they ran."""
TIME = datetime(2026, 1, 31, 12, tzinfo=UTC)


class Store:
    """A database, and jobs whose records come in whatever order a test wants."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(f"sqlite:///{folder / 'shardyard.db'}")
        self.database.migrate()
        self.ingest = Ingest(self.database, Hub(), TokenMint(folder / "attempt.key"), on_phase=lambda: None)
        self._numbers = itertools.count()

    def job(self) -> str:
        job_id = f"job-{next(self._numbers)}"
        values = {
            "id": job_id, "owner": "me", "name": "x", "spec": "{}", "storage": "/nowhere", "state": "running",
            "reason": "", "num_steps": 9, "created_at": 0, "updated_at": 0, "queued_at": 0, "attempt": 9,
            "launch": "submitted",
        }  # fmt: skip
        with self.database.write() as tx:
            insert_job(tx, values, {})
        return job_id

    def events(self, job_id: str) -> list[Event]:
        with self.database.read() as tx:
            job = get_job(tx, job_id)
            assert job is not None
            return [Event.model_validate_json(to_wire(row).json) for row in events_after(tx, job.number, 0, 1000)]

    def history(self, job_id: str) -> dict[int, Writer]:
        with self.database.read() as tx:
            job = get_job(tx, job_id)
        assert job is not None
        points = metric_history(self.database, job.number, None, 0, 1000)
        return {point["step"]: tuple(point["writer"]) for point in points}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("store"))
    yield store
    store.database.close()


class Stream:
    """A connection over which a client gets these events, and then the end."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def stream(self, *_: Any, **__: Any) -> Any:
        sent = (f"data: {event.model_dump_json()}\n\n".encode() for event in self._events)
        return nullcontext(sent)

    def get(self, _path: str) -> dict[str, Any]:
        return {"state": "succeeded", "last_event_id": len(self._events)}


runs = st.dictionaries(
    st.tuples(st.integers(1, 3), st.integers(0, 2)),
    st.tuples(st.integers(1, 8), st.integers(0, 6)),
    min_size=1,
    max_size=5,
)
"""Of each worker group its first step, and how many it recorded."""


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs, st.randoms(use_true_random=False))
def test_whatever_comes_when_the_newest_is_known(
    store: Store, runs: dict[Writer, tuple[int, int]], random: Any
) -> None:
    job_id = store.job()
    left = {writer: [*range(first, first + count)] for writer, (first, count) in runs.items()}
    taken = dict.fromkeys(runs, 0)
    while any(left.values()):
        attempt, group = writer = random.choice([writer for writer, steps in left.items() if steps])
        portion = [left[writer].pop(0) for _ in range(random.randint(1, len(left[writer])))]
        records = [Record(kind="metric", time=TIME, data={"step": step, "writer": writer}) for step in portion]
        store.ingest.take_over(job_id, attempt, f"group-{group}", taken[writer], records)
        taken[writer] += len(portion)
    events = store.events(job_id)
    assert [event.id for event in events] == list(range(1, len(events) + 1)), "none is lost"

    news = [tuple(event.data["writer"]) for event in events if not event.superseded]
    assert news == sorted(news)
    recorded = [writer for writer, (_, count) in runs.items() if count]
    assert news[-1:] == sorted(recorded)[-1:]

    with_all = list(Job(Stream(events), Patience(), {"id": job_id}).events(redone=True))  # type: ignore[arg-type]
    assert with_all == events
    given = list(Job(Stream(events), Patience(), {"id": job_id}).events())  # type: ignore[arg-type]
    newest = {event.data["step"]: tuple(event.data["writer"]) for event in given}
    assert newest == store.history(job_id)
    assert newest == {step: writer for writer in sorted(runs) for step in range(runs[writer][0], sum(runs[writer]))}
