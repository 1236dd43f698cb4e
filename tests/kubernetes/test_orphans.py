"""RayJobs that nobody waits for: ended if they are ours and over, and left alone if they may be live."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control.kubernetes import RAY_JOBS
from service.control.launcher.launcher import Submission
from service.control.scheduling import orphans
from service.control.scheduling.orphans import action_on
from service.control.store.jobs import JobRow
from service.wire.launch import Launch, Result
from service.wire.states import ACTIVE, State
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.launching import name_of
from tests.kubernetes.operator import Operator
from tests.kubernetes.planes import Plane
from tests.processes import await_that

SUCCEEDED = Result(outcome="succeeded", step=5)


@pytest.fixture
def operator(shared_server: ApiServer) -> Operator:
    return Operator(shared_server)


@pytest.fixture
def plane(shared_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    monkeypatch.setattr(orphans, "INTERVAL_S", 0.0)
    plane = Plane(shared_server, tmp_path)
    yield plane
    plane.stop()


class LateLaunches:
    """A control plane that has lost its lease: each launch is kept, and can be made again later."""

    def __init__(self, plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
        self._submit = plane.launcher.submit
        self._launches: dict[str, Launch] = {}
        self.instance = ""
        monkeypatch.setattr(plane.launcher, "submit", self._note_and_submit)

    def _note_and_submit(self, launch: Launch) -> None:
        self._launches[launch.job_id], self.instance = launch, launch.instance
        self._submit(launch)

    def again(self, job_id: str, /, **changes: object) -> str:
        """Launch the job's attempt again; returns the name of its RayJob."""
        launch = self._launches[job_id].model_copy(update=changes)
        self._submit(launch)
        return name_of(launch)


@pytest.fixture
def late(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> LateLaunches:
    return LateLaunches(plane, monkeypatch)


def succeed(plane: Plane, operator: Operator) -> str:
    """Id of a job that has succeeded, and whose RayJob is gone."""
    job_id = plane.post()
    name = plane.await_launch(job_id)
    operator.start_cluster(name)
    operator.run(name)
    plane.end(job_id, SUCCEEDED)
    operator.end(name)
    plane.await_job(job_id, lambda job: job.state == "succeeded")
    plane.launcher.forget_job(job_id)
    await_that(lambda: name not in operator.ray_jobs())
    await_that(lambda: plane.launcher.observe(f"{job_id}-a1").status == "unknown")
    return job_id


def step_until_gone(plane: Plane, operator: Operator, name: str) -> None:
    await_that(lambda: plane.services.controller.step() or name not in operator.ray_jobs(), timeout_s=30.0)


@pytest.mark.parametrize("end", ["succeeded", "deleted"])
def test_a_launch_that_arrives_after_its_jobs_end_is_ended(
    plane: Plane, operator: Operator, late: LateLaunches, end: str
) -> None:
    job_id = succeed(plane, operator)
    if end == "deleted":
        plane.services.deletions.ask(job_id, "tester")
        await_that(lambda: plane.services.controller.step() or "deleted" in plane.services.deletions.ask(job_id, "")[1])
    name = late.again(job_id)
    operator.start_cluster(name)
    step_until_gone(plane, operator, name)
    await_that(lambda: not any(pod.startswith(name) for pod in operator.pods()), timeout_s=30.0)


def test_what_may_be_live_is_left_alone(
    plane: Plane, operator: Operator, late: LateLaunches, shared_server: ApiServer
) -> None:
    """A running job's, a newer attempt's than the store's, an unknown job's, and another installation's."""
    running = plane.post()
    plane.await_launch(running)
    over = succeed(plane, operator)
    names = [
        plane.name(running),
        late.again(over, attempt=2),
        late.again(over, job_id="job-unknown22222"),
        late.again(over, instance="0123456789abcdef"),
    ]
    before = {name: operator.ray_jobs()[name]["metadata"]["uid"] for name in names}
    await_that(lambda: len(plane.launcher.submissions(late.instance)) >= 3)
    for _ in range(3):
        plane.services.controller.step()
    after = operator.ray_jobs()
    assert {name: after[name]["metadata"]["uid"] for name in names} == before
    assert not any(after[name]["spec"].get("suspend") for name in names)
    for name in names:
        shared_server.admin("DELETE", RAY_JOBS, name)


JOB = JobRow(**dict.fromkeys(JobRow.__dataclass_fields__))  # type: ignore[arg-type]


@given(
    attempt=st.integers(1, 4), stored=st.integers(1, 4), state=st.sampled_from(State),
    launch=st.sampled_from([None, "due", "submitted"]), has_ended=st.booleans(), is_deleted=st.booleans(),
)  # fmt: skip
def test_only_what_is_over_is_ended(
    attempt: int, stored: int, state: State, launch: str | None, has_ended: bool, is_deleted: bool
) -> None:
    submission = Submission(f"job-a-a{attempt}", has_ended)
    assert action_on(submission, attempt, None, is_deleted=is_deleted) == ("forget" if is_deleted else "leave")
    job = replace(JOB, state=state, attempt=stored, launch=launch)
    is_live = attempt > stored or (attempt == stored and state in ACTIVE and launch is not None)
    expected = "leave" if is_live or has_ended else "stop"
    assert action_on(submission, attempt, job, is_deleted=False) == expected
