"""Nothing is lost when the control plane is killed at any moment: the next one continues."""

import threading
from pathlib import Path

import httpx
import pytest

from service.control.launcher.launcher import LauncherUnavailable, Observation
from service.wire.events import Event
from service.wire.launch import Launch
from service.wire.states import ENDED
from tests.processes import await_that
from tests.service.control_plane import ControlPlane, spec
from tests.service.controllers import (
    DeadlyLauncher,
    SimulatedKill,
    controller_on,
    local_cluster,
    step_job,
    stored_job,
    submit_job,
)


def test_a_run_and_a_stream_survive_kills_of_the_control_plane(own_plane: ControlPlane) -> None:
    own_plane.start()
    num_steps = 400
    hold = own_plane.hold()  # while it is there, the driver outlives its last step
    labels = {"step_ms": "5", "hold": hold.name}
    job = own_plane.post(labels=labels, train={"num_steps": num_steps, "batch_tokens": 1024})
    stream_events: list[Event] = []
    breaks = 0

    def follow() -> None:
        nonlocal breaks
        while not (stream_events and stream_events[-1].data.get("state") in ENDED):
            try:
                stream_events.extend(own_plane.events(job["id"], stream_events[-1].id if stream_events else None))
            except httpx.TransportError:
                breaks += 1
            threading.Event().wait(0.05)

    follower = threading.Thread(target=follow)
    follower.start()
    for steps in (20, 60, 100):
        await_that(lambda steps=steps: sum(event.kind == "metric" for event in stream_events) >= steps)
        own_plane.kill()
        own_plane.driver(job["id"])  # training never stopped
        own_plane.start()
    hold.unlink()
    follower.join()
    assert breaks >= 3
    assert [event.id for event in stream_events] == list(range(1, len(stream_events) + 1))
    assert [event.data["step"] for event in stream_events if event.kind == "metric"] == list(range(1, num_steps + 1))
    assert own_plane.launcher.launches() == [f"{job['id']}-a1"]
    assert own_plane.job(job["id"])["state"] == "succeeded"


def test_killed_while_jobs_are_posted(own_plane: ControlPlane) -> None:
    """Every job that was acknowledged is there afterwards, once, and is run."""
    own_plane.start()
    job_ids: list[str] = []
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
                job_ids.append(answer.json()["id"])
                break

    poster = threading.Thread(target=post)
    poster.start()
    for _ in range(2):
        num_acknowledged = len(job_ids)
        await_that(lambda num_acknowledged=num_acknowledged: len(job_ids) > num_acknowledged + 3)
        own_plane.kill()
        own_plane.start()
    stop.set()
    poster.join()
    for job_id in job_ids:
        own_plane.await_state(job_id, "succeeded")
    stored_ids = {item["id"] for item in own_plane.list_jobs(limit=200)}
    assert len(job_ids) == len(set(job_ids))
    assert set(job_ids) <= stored_ids
    assert len(stored_ids) <= len(job_ids) + 1  # the one whose client was stopped


@pytest.mark.sample(3)
@pytest.mark.parametrize("after", [False, True], ids=["before the call", "after the call"])
@pytest.mark.parametrize("call", range(1, 9))
def test_killed_at_any_call_to_the_cluster(tmp_path: Path, call: int, after: bool) -> None:
    """A new controller continues: the job ends as it would have, and no attempt is launched twice."""
    cluster = local_cluster(tmp_path)
    first = controller_on(tmp_path, DeadlyLauncher(cluster, call, after))
    # `silent`: nobody listens to this run, so that it goes on to its end by itself.
    job_id = submit_job(first, labels={"silent": "yes", "die_at": "2"}).id
    with pytest.raises(SimulatedKill):
        await_that(lambda: step_job(first, job_id).state in ENDED)
    second = controller_on(tmp_path, cluster)
    await_that(lambda: step_job(second, job_id).state in ENDED)
    job = stored_job(second, job_id)
    assert (job.state, job.attempt, job.failures) == ("succeeded", 2, 1)
    assert cluster.launches() == [f"{job_id}-a1", f"{job_id}-a2"]
    cluster.end_all()
    for services in (first, second):
        services.database.close()


class LateLauncher(DeadlyLauncher):
    """Loses the answer of a submission, which reaches the cluster only later."""

    on_its_way: Launch | None = None

    def submit(self, launch: Launch) -> None:
        self.on_its_way = launch
        raise LauncherUnavailable("the answer was lost")


def test_cancelled_while_a_submission_is_on_its_way(tmp_path: Path) -> None:
    """The job does not end while its driver may still appear; a driver that appears is stopped first."""
    cluster = local_cluster(tmp_path)
    late_launcher = LateLauncher(cluster)
    services = controller_on(tmp_path, late_launcher, lost_grace_s=60, cancel_deadline_s=0.1)
    job_id = submit_job(services, labels={"silent": "yes", "step_ms": "1000"}).id
    await_that(lambda: step_job(services, job_id).state == "starting" and late_launcher.on_its_way is not None)
    services.requests.cancel(job_id, "tester")
    for _ in range(5):
        assert step_job(services, job_id).state == "starting"
    cluster.submit(late_launcher.on_its_way)
    await_that(lambda: step_job(services, job_id).state == "cancelled")
    assert cluster.process(f"{job_id}-a1") is None
    cluster.end_all()
    services.database.close()


class SilentLauncher(DeadlyLauncher):
    """Accepts submissions, and answers no query once `silent` is set."""

    silent, num_asked = False, 0

    def observe(self, submission_id: str) -> Observation:
        self.num_asked += 1
        if self.silent:
            raise LauncherUnavailable("no answer in time")
        return super().observe(submission_id)


def test_a_cluster_that_does_not_answer_is_asked_once_a_step(tmp_path: Path) -> None:
    """However many jobs there are, since the controller waits in vain each time."""
    cluster = local_cluster(tmp_path)
    silent = SilentLauncher(cluster)
    services = controller_on(tmp_path, silent)
    jobs = [submit_job(services, labels={"silent": "yes", "step_ms": "100000"}).id for _ in range(2)]
    await_that(lambda: [step_job(services, job_id).launch for job_id in jobs] == ["submitted"] * 2)
    silent.silent, silent.num_asked = True, 0
    services.controller.step()
    assert silent.num_asked == 1
    cluster.end_all()
    services.database.close()


def test_two_control_planes_on_one_database(own_plane: ControlPlane) -> None:
    """The second answers and does not act; when the first is gone, it does."""
    own_plane.start(ping_interval_s=0.2)
    second = ControlPlane(own_plane.folder, ping_interval_s=0.2).start()

    def role(plane: ControlPlane) -> str:
        return str(plane.http.get("/readyz").json()["controller"])

    try:
        assert (role(own_plane), role(second)) == ("acting", "standing by")
        assert second.http.get("/readyz").json()["holder"] == own_plane.http.get("/readyz").json()["holder"]
        events = list(second.events(second.post()["id"]))  # the one that acts finds it in the store
        assert events[-1].data["state"] == "succeeded"
        assert [event.id for event in events] == list(range(1, len(events) + 1))
        own_plane.kill()
        await_that(lambda: role(second) == "acting")
        second.finished_job()
        assert len(second.launcher.launches()) == 2
        # An orderly exit hands over at once.
        own_plane.start()
        assert second.terminate() == 0
        await_that(lambda: role(own_plane) == "acting")
    finally:
        second.close()
