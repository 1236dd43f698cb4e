"""Records that are heard late, or taken from storage: each counts once, and older ones are marked as superseded."""

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
from service.control.report.curve_store import CurveStore
from service.control.report.event_text import to_wire
from service.control.report.history import metric_history
from service.control.report.hub import Hub
from service.control.report.ingest import Ingest
from service.control.report.tokens import TokenMint
from service.control.store.database import Database
from service.control.store.events import events_after
from service.control.store.jobs import get_job, insert_job
from service.wire.events import Event, Record
from tests.processes import await_that
from tests.service.control_plane import ControlPlane
from tests.service.local_launcher import launches
from tests.service.silent_run import Run, checkpoint, metric, record

Writer = tuple[int, int]
"""(attempt, group), in the order in which they ran."""
TIME = datetime(2026, 1, 31, 12, tzinfo=UTC)


class Store:
    """A database, and jobs whose records come in any order."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(f"sqlite:///{folder / 'shardyard.db'}")
        self.database.migrate()
        self.ingest = Ingest(self.database, Hub(), TokenMint(b"key"), on_phase=lambda: None)
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
            return [Event.model_validate_json(to_wire(row).json) for row in events_after(tx, job.number, 0, 1000)]

    def history(self, job_id: str) -> dict[int, Writer]:
        with self.database.read() as tx:
            job = get_job(tx, job_id)
        points = metric_history(self.database, CurveStore(self.database), job.number, None, 0, 1000)
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
        messages = (f"data: {event.model_dump_json()}\n\n".encode() for event in self._events)
        return nullcontext(messages)

    def get(self, _path: str) -> dict[str, Any]:
        return {"state": "succeeded", "last_event_id": len(self._events)}


runs = st.dictionaries(
    st.tuples(st.integers(1, 3), st.integers(0, 2)),
    st.tuples(st.integers(1, 8), st.integers(0, 6)),
    min_size=1,
    max_size=5,
)
"""(first step, number of recorded steps) of each worker group."""


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs, st.randoms(use_true_random=False))
def test_the_newest_is_known_whatever_comes(store: Store, runs: dict[Writer, tuple[int, int]], random: Any) -> None:
    job_id = store.job()
    left = {writer: [*range(first, first + count)] for writer, (first, count) in runs.items()}
    num_taken = dict.fromkeys(runs, 0)
    while any(left.values()):
        attempt, group = writer = random.choice([writer for writer, steps in left.items() if steps])
        portion = [left[writer].pop(0) for _ in range(random.randint(1, len(left[writer])))]
        records = [Record(kind="metric", time=TIME, data={"step": step, "writer": writer}) for step in portion]
        store.ingest.take_over(job_id, attempt, f"group-{group}", num_taken[writer], records)
        num_taken[writer] += len(portion)
    events = store.events(job_id)
    assert [event.id for event in events] == list(range(1, len(events) + 1)), "none is lost"

    news = [tuple(event.data["writer"]) for event in events if not event.superseded]
    assert news == sorted(news)
    writers = [writer for writer, (_, count) in runs.items() if count]
    assert news[-1:] == sorted(writers)[-1:]

    with_all = list(Job(Stream(events), Patience(), {"id": job_id}).events(redone=True))  # type: ignore[arg-type]
    assert with_all == events
    client_events = list(Job(Stream(events), Patience(), {"id": job_id}).events())  # type: ignore[arg-type]
    newest = {event.data["step"]: tuple(event.data["writer"]) for event in client_events}
    assert newest == store.history(job_id)
    assert newest == {step: writer for writer in sorted(runs) for step in range(runs[writer][0], sum(runs[writer]))}


@pytest.mark.slow
def test_failures_that_nobody_heard_of_count(own_plane: ControlPlane) -> None:
    run = Run(own_plane.start())
    own_plane.kill()
    run.seal("a1.driver", *[record("recovering", reason="died")] * 2)
    own_plane.driver(run.id).kill()
    own_plane.start()
    await_that(lambda: launches(run.storage, 2) != [])
    assert own_plane.job(run.id)["failures"] == 3
    assert run.launch(2)["max_failures"] == 0
    run.end()


def test_a_checkpoint_that_is_heard_of_late_forgives_too(own_plane: ControlPlane) -> None:
    """It was committed on a node that died with its worker group, and another group has begun since."""
    run = Run(own_plane.start())
    run.send(0, *[record("recovering", reason="a node died")] * 2, writer="driver")
    run.send(0, metric(51), writer="group-1")
    run.seal("a1.g0", checkpoint(50))
    run.kill_driver()
    assert own_plane.job(run.id)["failures"] == 1, "the driver's"
    run.end()


def test_records_that_were_never_delivered_are_taken_over_from_storage(plane: ControlPlane) -> None:
    run = Run(plane)
    run.send(0, metric(1))
    run.seal("a1.g0", *map(metric, (1, 2, 3)))
    run.seal("a1.g0", *map(metric, (4, 5)), segment=1, first_seq=3)
    with (run.storage / "metrics/a1.g0/segment-00000001.jsonl").open("a") as segment:
        segment.write('{"seq": 5, "torn')
    run.seal("a1.driver", record("log", level="info", message="last words"))
    run.end()
    assert run.steps() == [1, 2, 3, 4, 5]
    events = list(plane.events(run.id))
    assert [event.data.get("message") for event in events if event.actor == "driver"] == ["last words"]
    assert events[-1].data["state"] == "cancelled"  # the end comes after all that led to it


def test_late_records_of_an_older_group_fill_history_and_change_no_status(plane: ControlPlane) -> None:
    run = Run(plane)
    run.send(0, metric(4, loss=2.0), metric(5, loss=2.0), writer="group-1")
    run.seal("a1.g0", *(metric(step, loss=1.0) for step in range(1, 7)))
    run.end()
    assert plane.losses(run.id) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: 2.0, 6: 1.0}
    assert plane.job(run.id)["step"] == 5


def test_records_that_an_older_attempt_left_are_taken_over_at_the_next_end(plane: ControlPlane) -> None:
    run = Run(plane)
    run.send(0, record("started", group=0), metric(1))
    run.kill_driver()
    run.seal("a1.g0", record("log"), metric(1), metric(2))  # by attempt 2
    assert run.send(0, metric(3), attempt=2, token=run.launch(2)["token"]).status_code == 200
    run.end()
    assert run.steps() == [1, 2, 3]
    assert plane.job(run.id)["step"] == 3
