"""Pages of a job's records for a tracker that cannot replace values."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe.spec import JobSpec
from service.control.report.hub import Hub
from service.control.report.ingest import Ingest
from service.control.report.tokens import TokenMint
from service.control.store.database import Database
from service.control.store.jobs import get_job, insert_job, set_columns
from service.control.tracking import unsent
from service.control.tracking.unsent import read_unsent
from service.wire.events import Record
from tests.service.control_plane import spec

JOB_SPEC = JobSpec.parse(spec())
TIME = datetime(2026, 1, 31, 12, tzinfo=UTC)
Group = list[tuple[bool, bool]]
"""For each step, whether a checkpoint follows, and whether the tracker reads then."""


class Follower:
    """A job, and what a tracker has read of it."""

    def __init__(self, database: Database, ingest: Ingest, job_id: str) -> None:
        self.database, self.ingest, self.job_id = database, ingest, job_id
        values = {
            "id": job_id, "owner": "me", "name": "x", "spec": "{}", "storage": "/nowhere", "state": "running",
            "reason": "", "num_steps": 9, "created_at": 0, "updated_at": 0, "queued_at": 0, "attempt": 1,
            "launch": "submitted",
        }  # fmt: skip
        with database.write() as tx:
            self.number = insert_job(tx, values, {}).number
        self.place = 0
        self.read: list[tuple[int, int]] = []
        """(step, group), in order."""

    def record(self, group: int, seq: int, kind: str, step: int) -> None:
        record = Record(kind=kind, time=TIME, data={"step": step, "loss": 1.0})  # type: ignore[arg-type]
        assert self.ingest.take_over(self.job_id, 1, f"group-{group}", seq, [record]) == 1

    def look(self, committed_only: bool) -> None:
        while True:
            with self.database.read() as tx:
                page = read_unsent(tx, self.number, JOB_SPEC, self.place, committed_only)
            if page is None:
                return
            self.read += [(item.step, item.group) for item in page.steps]
            self.place = page.through

    def end(self) -> None:
        with self.database.write() as tx:
            set_columns(tx, self.number, {"state": "cancelled", "finished_at": 1, "launch": None})


@pytest.fixture
def follow(database: Database, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Follower]:
    ingest = Ingest(database, Hub(), TokenMint(b"key"), on_phase=lambda: None)
    numbers = iter(range(10_000))
    return lambda: Follower(database, ingest, f"job-{next(numbers)}")


GROUPS = st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6), max_size=4)


@given(groups=GROUPS, page=st.integers(1, 5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_committed_steps_come_once_with_their_newest_values(
    follow: Callable[[], Follower], groups: list[Group], page: int
) -> None:
    """Each group records steps from the newest checkpoint on; some are followed by a checkpoint, or read."""
    follower, committed, newest = follow(), 0, dict[int, int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unsent, "PAGE_EVENTS", page)
        for group, records in enumerate(groups):
            seq = 0
            if records:
                newest = {step: other for step, other in newest.items() if step <= committed}
            for step, (commits, reads) in enumerate(records, start=committed + 1):
                follower.record(group, seq, "metric", step)
                newest[step], seq = group, seq + 1
                if commits:
                    follower.record(group, seq, "checkpoint", step)
                    committed, seq = step, seq + 1
                if reads:
                    follower.look(committed_only=True)
        assert max((step for step, _ in follower.read), default=0) <= committed
        follower.end()
        follower.look(committed_only=True)
    assert follower.read == sorted(newest.items())


def test_a_new_tracker_gets_no_steps_that_were_repeated(follow: Callable[[], Follower]) -> None:
    follower = follow()
    for seq, step in enumerate(range(1, 7)):
        follower.record(0, seq, "metric", step)
    for seq, step in enumerate((3, 4)):
        follower.record(1, seq, "metric", step)
    follower.look(committed_only=False)
    assert follower.read == [(1, 0), (2, 0), (3, 1), (4, 1)]
    with follower.database.read() as tx:
        assert get_job(tx, follower.job_id).step == 4
