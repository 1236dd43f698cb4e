"""Failures and lost clusters count since a job's last progress, however late records come in; a job that loses its
cluster over and over is paused."""

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.spec import Backoff, RetrySpec
from service.control.api.services import Services
from service.control.launcher.launcher import Observation
from service.control.report.failure_history import END, MAX_STORED_FAILURES, FailureHistory, read_failures
from service.control.scheduling import policies
from service.control.scheduling.policies import MAX_LOST_STARTS, MAX_SETBACKS
from service.control.store.jobs import JobRow
from service.wire.events import Record, RecordBatch, RecordKind
from service.wire.launch import Launch
from tests.processes import await_that
from tests.service.control_plane import ControlPlane
from tests.service.controllers import DeadlyLauncher, controller_on, local_cluster, step_job, submit_job
from tests.service.silent_run import Run, checkpoint, record

moments = st.tuples(st.integers(1, 4), st.integers(0, 50))


def time_at(second: int) -> str:
    return f"2026-01-31T11:00:{second:02}Z"


def failure(second: int, **data: Any) -> dict[str, Any]:
    return record("recovering", time_at(second), **{"reason": "worker 1 died", **data})


@given(st.lists(moments, unique=True, max_size=12), st.data())
def test_forgiveness_does_not_depend_on_the_order(times: list[tuple[int, int]], data: st.DataObject) -> None:
    progress = set(data.draw(st.lists(st.sampled_from(times), unique=True))) if times else set()
    losses = FailureHistory()
    for time in data.draw(st.permutations(times)):
        losses = losses.after_progress(time) if time in progress else losses.after_failure(time)
    since = max(progress, default=(0, 0))
    assert losses.num_failures == len([moment for moment in times if moment > since])
    assert losses == read_failures(losses.model_dump_json(), 0)


def test_more_failures_than_are_kept_one_by_one_count_and_are_forgiven_all_the_same() -> None:
    losses = FailureHistory()
    for time in range(3 * MAX_STORED_FAILURES):
        losses = losses.after_failure((1, time))
    assert losses.num_failures == 3 * MAX_STORED_FAILURES
    assert len(losses.failures) == MAX_STORED_FAILURES
    assert losses.after_progress((1, 3 * MAX_STORED_FAILURES - 2)).num_failures == 1
    assert losses.after_progress((1, MAX_STORED_FAILURES)).num_failures == 3 * MAX_STORED_FAILURES, (
        "none that is known to be older"
    )


def test_an_attempt_lost_after_its_progress_is_still_a_setback() -> None:
    losses = FailureHistory().after_setback(1).after_setback(2).after_failure((2, END))
    late_progress = losses.after_progress((2, 7))  # a commit of attempt 2 that is heard of only now
    assert (late_progress.setbacks, late_progress.num_failures) == ((2,), 1)
    assert late_progress.after_progress((3, 1)).setbacks == ()
    assert FailureHistory().after_lost_start(1).after_progress((2, 7)).lost_starts == ()


def test_failures_that_an_earlier_release_counted_are_of_no_kind_and_forgiven_by_progress() -> None:
    before = read_failures(None, 3)
    assert (before.num_failures, before.after_progress((1, 1)).num_failures) == (3, 0)
    history = FailureHistory(failures=((1, 1), (1, 2)), kinds=("lost",))
    assert (history.num_of("lost"), history.after_failure((1, 3), "lost").num_of("lost")) == (0, 1)


def test_kinds_of_failures_that_are_not_kept_one_by_one_count_too() -> None:
    retry = RetrySpec.model_validate({"max_failures": 200, "kinds": {"lost": {"max_failures": 100}}})
    losses = FailureHistory()
    for time in range(2 * MAX_STORED_FAILURES):
        losses = losses.after_failure((1, time), "error" if time % 2 else "lost")
    assert (losses.num_of("lost"), losses.num_left(retry, "lost")) == (MAX_STORED_FAILURES, 0)
    assert losses.num_left(retry, "error") == 200 - MAX_STORED_FAILURES
    assert read_failures(losses.model_dump_json(), 0) == losses
    assert losses.after_progress((1, 3 * MAX_STORED_FAILURES)).num_of("lost") == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("batches", "failures"),
    [
        ([("driver", [failure(10, reason="a node was preempted", kind="lost", preempted=True), failure(20)])], 1),
        # A checkpoint that is heard of late forgives no later failure.
        ([("driver", [failure(10), failure(20), failure(30)]), ("group-1", [checkpoint(50, time_at(15))])], 2),
        # A failure that is heard of late is forgiven by a checkpoint after it.
        ([("group-1", [checkpoint(50, time_at(15))]), ("driver", [failure(10), failure(20)])], 1),
    ],
    ids=["preempted", "late checkpoint", "late failure"],
)
def test_failures_that_count(run: Run, batches: list[tuple[str, list[dict[str, Any]]]], failures: int) -> None:
    for writer, records in batches:
        run.send(0, *records, writer=writer)
    assert run.plane.job(run.id)["failures"] == failures


@pytest.mark.slow
def test_a_checkpoint_of_a_dead_attempt_does_not_forgive_its_death(own_plane: ControlPlane) -> None:
    """Its record is on storage only once the next attempt has put it there."""
    run = Run(own_plane.start())
    run.kill_driver()
    run.seal("a1.g0", checkpoint(50))
    run.kill_driver(2)
    assert own_plane.job(run.id)["failures"] == 2
    num_events = run.num_events()
    run.end()
    heard_of = [event for event in own_plane.events(run.id) if event.kind == "checkpoint"]
    assert [event.data["step"] for event in heard_of] == [50]
    assert heard_of[0].id <= num_events, "and counted by then"


class ForgetfulLauncher(DeadlyLauncher):
    """A cluster that every launch brings down, and whose replacement knows of no submission."""

    def __init__(self, folder: Path) -> None:
        super().__init__(local_cluster(folder))
        self.launches: list[Launch] = []
        self.stopped_ids: list[str] = []

    def submit(self, launch: Launch) -> None:
        self.launches.append(launch)

    def observe(self, submission_id: str) -> Observation:
        return Observation(status="unknown")

    def stop(self, submission_id: str) -> None:
        self.stopped_ids.append(submission_id)


@pytest.fixture
def cluster(tmp_path: Path) -> ForgetfulLauncher:
    return ForgetfulLauncher(tmp_path)


@pytest.fixture
def services(tmp_path: Path, cluster: ForgetfulLauncher, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    monkeypatch.setattr(policies, "Backoff", lambda: Backoff(first_s=0.0))
    services = controller_on(tmp_path, cluster, lost_grace_s=0.001)
    yield services
    services.database.close()


def tell(
    services: Services,
    cluster: ForgetfulLauncher,
    job: JobRow,
    kind: RecordKind,
    data: dict[str, Any],
    writer: str = "group-0",
) -> None:
    """Send a record as the first of a writer of the job's attempt."""
    record = Record(kind=kind, time=datetime.now(UTC), data=data)
    batch = RecordBatch(attempt=job.attempt, writer=writer, first_seq=0, records=(record,))
    services.ingest.take(job.id, cluster.launches[-1].token.get_secret_value(), batch)


def paused_in_a_step(services: Services, cluster: ForgetfulLauncher, job_id: str, *, has_begun: bool) -> bool:
    """Whether a step pauses the job; all its attempts wait for resources, after they began or before."""
    job = step_job(services, job_id)
    if job.launch == "submitted" and job.group_phase is None:
        if has_begun:
            tell(services, cluster, job, "started", {"group": 0, "workers": []})
        # An attempt that began and waits again still counts as begun.
        tell(services, cluster, job, "waiting", {"reason": "waiting for resources"}, "driver")
    return job.state == "paused"


@pytest.mark.slow
def test_a_job_whose_cluster_is_lost_again_and_again_is_paused(services: Services, cluster: ForgetfulLauncher) -> None:
    job_id = submit_job(services).id
    is_paused = partial(paused_in_a_step, services, cluster, job_id, has_begun=True)
    for attempt in (MAX_SETBACKS, 2 * MAX_SETBACKS):
        await_that(is_paused, lambda: f"{step_job(services, job_id)}")
        job = step_job(services, job_id)
        assert (job.attempt, job.failures) == (attempt, 0)
        assert job.reason == (
            f"paused: attempt {attempt} was lost with its cluster; 5 attempts were lost without progress, so "
            "this job or another may be bringing the cluster down; find out why "
            "(memory, Ray's logs), then resume it"
        )
        assert f"{job_id}-a{attempt}" in cluster.stopped_ids, "it may only have been out of sight"
        services.requests.resume(job_id, "tester")
    assert len({launch.attempt for launch in cluster.launches}) == 2 * MAX_SETBACKS


@pytest.mark.slow
def test_a_job_that_waits_while_its_cluster_is_lost_waits_longer(
    services: Services, cluster: ForgetfulLauncher
) -> None:
    job_id = submit_job(services).id
    is_paused = partial(paused_in_a_step, services, cluster, job_id, has_begun=False)
    await_that(is_paused, lambda: f"{step_job(services, job_id)}")
    job = step_job(services, job_id)
    assert (job.attempt, job.failures) == (MAX_LOST_STARTS, 0)
    assert job.reason.startswith(
        "paused: attempt 20 was lost with its cluster, before its workers started; 20 attempts were "
    )


def test_progress_of_each_third_attempt_is_enough(services: Services, cluster: ForgetfulLauncher) -> None:
    job_id = submit_job(services).id
    attempts: set[int] = set()

    def goes_on() -> bool:
        job = step_job(services, job_id)
        if job.launch == "submitted" and job.attempt % 3 == 0 and job.attempt not in attempts:
            attempts.add(job.attempt)
            tell(services, cluster, job, "checkpoint", {"step": job.attempt})
        assert job.state != "paused", job.reason
        return job.attempt > 2 * MAX_SETBACKS

    await_that(goes_on)


def test_kinds_with_a_limit_are_counted_alone_and_progress_forgives_both() -> None:
    retry = RetrySpec.model_validate({"max_failures": 2, "kinds": {"lost": {"max_failures": 5}, "error": {}}})
    losses = FailureHistory(num_older=1)
    for time, kind in enumerate(("lost", "error", "lost", ""), start=1):
        losses = losses.after_failure((1, time), kind)
    assert (losses.num_of("lost"), losses.num_sharing(retry), losses.num_failures) == (2, 3, 5)
    assert [losses.num_left(retry, kind) for kind in ("lost", "error", "hung")] == [3, 0, 0]
    rest = losses.after_progress((1, 2))
    assert (rest.num_of("lost"), rest.num_of("error"), rest.num_sharing(retry)) == (1, 0, 1)
    assert FailureHistory.model_validate_json(rest.model_dump_json()) == rest
