"""Nothing is lost: the control plane is killed at any moment, and the next goes on where it was."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from moe.plan import Calibration
from moe.spec import JobSpec
from service.control.api.services import Services
from service.control.app import open_services
from service.control.launcher.launcher import ClusterFacts, Launcher, LauncherUnavailable, Observation
from service.control.report.hub import Hub
from service.control.report.prometheus import Figures
from service.control.store.jobs import get_job
from service.settings import Settings
from service.wire.events import Event
from service.wire.launch import Launch
from service.wire.states import ENDED
from tests.processes import await_that
from tests.service.control_plane import NODE, ControlPlane, spec
from tests.service.local_launcher import LocalLauncher


def test_killed_in_mid_run_and_in_mid_stream(own_plane: ControlPlane) -> None:
    own_plane.start()
    num_steps = 400
    held = own_plane.folder / "state/cache/hold"  # while it is there, the driver outlives its last step
    held.parent.mkdir()
    held.touch()
    labels = {"step_ms": "5", "hold": held.name}
    job = own_plane.post(labels=labels, train={"num_steps": num_steps, "batch_tokens": 1024})
    followed: list[Event] = []
    breaks = 0

    def follow() -> None:
        nonlocal breaks
        while not (followed and followed[-1].data.get("state") in ENDED):
            try:
                followed.extend(own_plane.events(job["id"], followed[-1].id if followed else None))
            except httpx.TransportError:
                breaks += 1
            threading.Event().wait(0.05)

    following = threading.Thread(target=follow)
    following.start()
    for steps in (20, 60, 100):
        await_that(lambda steps=steps: sum(event.kind == "metric" for event in followed) >= steps)
        own_plane.kill()
        driver = own_plane.launcher.process(f"{job['id']}-a1")
        assert driver is not None  # training never stopped
        own_plane.start()
    held.unlink()
    following.join()
    assert breaks >= 3
    assert [event.id for event in followed] == list(range(1, len(followed) + 1))
    assert [event.data["step"] for event in followed if event.kind == "metric"] == list(range(1, num_steps + 1))
    assert own_plane.launcher.launches() == [f"{job['id']}-a1"]
    assert own_plane.job(job["id"])["state"] == "succeeded"


def test_killed_while_jobs_are_posted(own_plane: ControlPlane) -> None:
    """Every job that was acknowledged is there afterwards, once, and is run."""
    own_plane.start()
    acknowledged: list[str] = []
    keys = iter(range(1000))
    stop = threading.Event()

    def post() -> None:
        while not stop.is_set():
            key = f"key-{next(keys)}"
            while not stop.is_set():  # a client whose answer was lost asks again, with the same key
                try:
                    answer = own_plane.http.post("/v1/jobs", json=spec(), headers={"idempotency-key": key})
                except httpx.TransportError:
                    continue
                acknowledged.append(answer.json()["id"])
                break

    posting = threading.Thread(target=post)
    posting.start()
    for _ in range(2):
        seen = len(acknowledged)
        await_that(lambda seen=seen: len(acknowledged) > seen + 3)
        own_plane.kill()
        own_plane.start()
    stop.set()
    posting.join()
    for job_id in acknowledged:
        own_plane.await_state(job_id, "succeeded")
    stored = {item["id"] for item in own_plane.http.get("/v1/jobs", params={"limit": 200}).json()["items"]}
    assert len(acknowledged) == len(set(acknowledged))
    assert set(acknowledged) <= stored
    assert len(stored) <= len(acknowledged) + 1  # the one whose asking was stopped


class Killed(BaseException):
    """Goes through every handler, as SIGKILL does."""


class DeadlyLauncher(Launcher):
    """Kills the controller before or after the call of the given number."""

    def __init__(self, launcher: Launcher, call: int, after: bool) -> None:
        self._launcher, self._left, self._after = launcher, call, after

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise Killed
        answer = function(*arguments)
        if self._left == 0:
            raise Killed
        return answer

    def cluster(self) -> ClusterFacts:
        return self._launcher.cluster()

    def submit(self, launch: Launch) -> None:
        self._call(self._launcher.submit, launch)

    def observe(self, submission_id: str) -> Observation:
        answer: Observation = self._call(self._launcher.observe, submission_id)
        return answer

    def stop(self, submission_id: str) -> None:
        self._call(self._launcher.stop, submission_id)

    def calibrate(self) -> Calibration:
        calibration: Calibration = self._call(self._launcher.calibrate)
        return calibration

    def dashboard_url(self, submission_id: str) -> str | None:
        answer: str | None = self._call(self._launcher.dashboard_url, submission_id)
        return answer


def controller_on(folder: Path, launcher: Launcher, **changes: Any) -> Services:
    given = {"lease_s": 0.01, "lost_grace_s": 0.2, "events_url": "http://127.0.0.1:9", **changes}
    settings = Settings(state_dir=folder / "state", **given)
    return open_services(settings, launcher, Hub(), Figures())


@pytest.mark.sample(6)
@pytest.mark.parametrize("after", [False, True], ids=["before the call", "after the call"])
@pytest.mark.parametrize("call", range(1, 9))
def test_killed_at_any_call_to_the_cluster(tmp_path: Path, call: int, after: bool) -> None:
    """A new controller goes on: the job ends as it would have, and no attempt was launched twice."""
    cluster = LocalLauncher(tmp_path / "cluster")
    cluster.set_nodes(NODE)
    first = controller_on(tmp_path, DeadlyLauncher(cluster, call, after))
    # `silent`: nobody listens to this run, so that it goes on to its end by itself.
    given = JobSpec.parse(spec(labels={"silent": "yes", "die_at": "2"}))
    job_id = first.requests.submit(given, "tester")[0].id

    def ended(services: Services) -> bool:
        services.controller.step()
        with services.database.read() as tx:
            job = get_job(tx, job_id)
        assert job is not None
        return job.state in ENDED

    killed = False
    try:
        await_that(lambda: ended(first))
    except Killed:
        killed = True
    assert killed
    second = controller_on(tmp_path, cluster)
    await_that(lambda: ended(second))
    with second.database.read() as tx:
        job = get_job(tx, job_id)
    assert job is not None
    assert (job.state, job.attempt, job.failures) == ("succeeded", 2, 1)
    assert cluster.launches() == [f"{job_id}-a1", f"{job_id}-a2"]
    cluster.end_all()
    for services in (first, second):
        services.database.close()


class LateLauncher(DeadlyLauncher):
    """Loses the answer of a submission, which reaches the cluster only later."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__(launcher, call=0, after=False)
        self.on_its_way: Launch | None = None

    def submit(self, launch: Launch) -> None:
        self.on_its_way = launch
        raise LauncherUnavailable("the answer was lost")


def test_cancelled_while_a_submission_is_on_its_way(tmp_path: Path) -> None:
    """The job has not ended while its driver may yet appear; once it has, it leaves the cluster first."""
    cluster = LocalLauncher(tmp_path / "cluster")
    cluster.set_nodes(NODE)
    late = LateLauncher(cluster)
    services = controller_on(tmp_path, late, lost_grace_s=60, cancel_deadline_s=0.1)
    given = JobSpec.parse(spec(labels={"silent": "yes", "step_ms": "1000"}))
    job_id = services.requests.submit(given, "tester")[0].id

    def state() -> str:
        services.controller.step()
        with services.database.read() as tx:
            job = get_job(tx, job_id)
        assert job is not None
        return job.state

    await_that(lambda: state() == "starting" and late.on_its_way is not None)
    services.requests.cancel(job_id, "tester")
    for _ in range(5):
        assert state() == "starting"
    assert late.on_its_way is not None
    cluster.submit(late.on_its_way)
    await_that(lambda: state() == "cancelled")
    assert cluster.process(f"{job_id}-a1") is None
    cluster.end_all()
    services.database.close()


class SilentLauncher(DeadlyLauncher):
    """Takes submissions, and from some time on answers no question."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__(launcher, call=0, after=False)
        self.silent, self.num_asked = False, 0

    def observe(self, submission_id: str) -> Observation:
        self.num_asked += 1
        if self.silent:
            raise LauncherUnavailable("no answer in time")
        return super().observe(submission_id)


def test_a_cluster_that_does_not_answer_is_asked_once_a_step(tmp_path: Path) -> None:
    """However many jobs there are: each time the controller waits for nothing."""
    cluster = LocalLauncher(tmp_path / "cluster")
    cluster.set_nodes(NODE)
    silent = SilentLauncher(cluster)
    services = controller_on(tmp_path, silent)
    given = JobSpec.parse(spec(labels={"silent": "yes", "step_ms": "100000"}))
    jobs = [services.requests.submit(given, "tester")[0] for _ in range(2)]

    def all_submitted() -> bool:
        services.controller.step()
        with services.database.read() as tx:
            return all(job is not None and job.launch == "submitted" for job in (get_job(tx, j.id) for j in jobs))

    await_that(all_submitted)
    silent.silent, silent.num_asked = True, 0
    services.controller.step()
    assert silent.num_asked == 1
    cluster.end_all()
    services.database.close()


def test_two_control_planes_on_one_database(own_plane: ControlPlane) -> None:
    """The second answers and does not act; when the first is gone, it does."""
    own_plane.settings["ping_interval_s"] = 0.2
    own_plane.start()
    second = ControlPlane(own_plane.folder)
    second.settings["ping_interval_s"] = 0.2
    second.start()
    try:
        assert own_plane.http.get("/readyz").json()["controller"] == "acting"
        assert second.http.get("/readyz").json()["controller"] == "standing by"
        assert second.http.get("/readyz").json()["holder"] == own_plane.http.get("/readyz").json()["holder"]
        job = second.post()  # the one that acts finds it in the store
        events = list(second.events(job["id"]))
        assert events[-1].data["state"] == "succeeded"
        assert [event.id for event in events] == list(range(1, len(events) + 1))
        own_plane.kill()
        await_that(lambda: second.http.get("/readyz").json()["controller"] == "acting")
        second.await_state(second.post()["id"], "succeeded")
        assert len(second.launcher.launches()) == 2
        # An orderly exit hands over at once.
        own_plane.start()
        assert second.terminate() == 0
        await_that(lambda: own_plane.http.get("/readyz").json()["controller"] == "acting")
    finally:
        second.close()
