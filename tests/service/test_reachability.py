"""An unreachable cluster: jobs and the API say since when and why, once; its old answers expire."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from moe.plan import Calibration
from service.control.launcher.launcher import ClusterFacts, LauncherUnavailable
from service.control.scheduling import job_plans, queue_reasons, reachability, starter
from service.control.scheduling.cluster_watch import ClusterWatch
from service.control.scheduling.reachability import REPORT_AFTER_S, REPORT_INTERVAL_S, Reachability
from service.control.store.events import events_after
from service.wire.launch import Launch
from tests.processes import await_that
from tests.service.control_plane import NODE, ControlPlane
from tests.service.controllers import DeadlyLauncher, controller_on, local_cluster, stored_job, submit_job
from tests.service.local_launcher import LocalLauncher
from tests.service_cli.command import shardyard


class HalfDead(DeadlyLauncher):
    """Answers every question, and fails to take a submission: a dashboard whose raylet is dead."""

    error: Exception = LauncherUnavailable("answers 500")

    def submit(self, launch: Launch) -> None:
        raise self.error


@pytest.mark.parametrize("error", [LauncherUnavailable("answers 500"), ZeroDivisionError()])
def test_a_repeated_failure_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    # Silence is reported at once instead of after three seconds.
    monkeypatch.setattr(reachability, "REPORT_AFTER_S", 0.0)
    monkeypatch.setattr(HalfDead, "error", error)
    services = controller_on(tmp_path, HalfDead(local_cluster(tmp_path)))
    number = submit_job(services).number
    with capture_logs() as log:
        for _ in range(50):
            services.controller.step()
    is_unreachable = isinstance(error, LauncherUnavailable)
    failure = "cannot reach the cluster; jobs are left as they are" if is_unreachable else "could not advance a job"
    assert [line["event"] for line in log] == ["admitted", "decided", failure]
    with services.database.read() as tx:
        states = [event.data for event in events_after(tx, number, 0, 1000) if event.kind == "state"]
    if is_unreachable:
        assert len(states) == 3, states
        assert "the cluster has been unreachable since 20" in states[-1]
        assert "answers 500" in states[-1]
    services.database.close()


def test_a_short_silence_is_no_news_and_a_long_one_is_told_with_its_beginning() -> None:
    time_s = 1_700_000_000.0
    cluster_reach = Reachability(clock=lambda: time_s)

    def step(error: str | None) -> str:
        cluster_reach.begin_step()
        if error:
            cluster_reach.record_failure(Exception(error))
        cluster_reach.end_step()
        return cluster_reach.describe_outage()

    assert step("refused") == ""
    time_s += REPORT_AFTER_S
    assert step("refused") == "the cluster has been unreachable since 2023-11-14T22:13:20Z: refused"
    time_s += 1
    assert step("request 17 failed").endswith(": refused"), "reasons that change each time are not all told"
    time_s += REPORT_INTERVAL_S
    assert step("request 18 failed").endswith("since 2023-11-14T22:13:20Z: request 18 failed")
    assert cluster_reach.describe_outage(reported_since=1_600_000_000).startswith(
        "the cluster has been unreachable since 2020-09-13T"
    )
    assert step(None) == ""
    time_s += 100
    assert step("refused") == "", "another silence, which began just now"


def test_an_unanswered_request_about_one_submission_silences_no_cluster() -> None:
    time_s = 1_700_000_000.0
    silences: list[float] = []
    cluster_reach = Reachability(clock=lambda: time_s, on_silence=lambda: silences.append(time_s))

    def step(*errors: LauncherUnavailable) -> bool:
        cluster_reach.begin_step()
        for error in errors:
            cluster_reach.record_failure(error)
        cluster_reach.end_step()
        return cluster_reach.answers

    of_one = LauncherUnavailable("no answer yet", is_of_one_request=True)
    assert step(of_one)
    assert not silences
    time_s += REPORT_AFTER_S
    assert step(of_one)
    assert cluster_reach.describe_outage().endswith(": no answer yet")
    for _ in range(2):
        assert not step(of_one, LauncherUnavailable("away"))
    assert len(silences) == 1
    assert step()
    assert cluster_reach.since is None


def test_reasons_of_the_queue_once_the_cluster_answers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of jobs that are rarely looked at: behind the first that waits, or too large for this cluster."""
    # Silence is reported at once instead of after three seconds.
    monkeypatch.setattr(reachability, "REPORT_AFTER_S", 0.0)
    monkeypatch.setattr(starter, "FACTS_AGE_S", 0.0)
    # Four jobs wait, more than are explained, as in a queue longer than the default of a hundred.
    monkeypatch.setattr(queue_reasons, "MAX_EXPLAINED", 2)
    monkeypatch.setattr(job_plans, "FACTS_AGE_S", 0.0)
    cluster = local_cluster(tmp_path)
    services = controller_on(tmp_path, cluster)

    def post(num_workers: int, **labels: str) -> str:
        return submit_job(services, resources={"num_workers": num_workers}, labels=labels).id

    def look() -> None:
        for _ in range(5):
            services.controller.step()

    too_large = post(500)
    first_reason = stored_job(services, too_large).reason
    cluster.set_reachable(False)
    running_id, *waiting_ids = [post(8, silent="yes", step_ms="100000") for _ in range(4)]
    look()
    for job_id in (too_large, running_id, *waiting_ids):
        assert "waiting for its turn; the cluster has been unreachable since 20" in stored_job(services, job_id).reason
    cluster.set_reachable(True)
    look()
    job = stored_job(services, running_id)
    assert (job.state, job.unreachable_since) == ("starting", None)
    holds = f"needs 8 workers of 1 CPU each; of the cluster's 8 CPUs on 1 node, {running_id} holds 8 CPUs"
    reasons = [stored_job(services, job_id).reason for job_id in (too_large, *waiting_ids)]
    assert reasons == [first_reason, holds, "waiting for its turn", "waiting for its turn"]
    cluster.end_all()
    services.database.close()


def test_jobs_and_the_api_say_since_when_and_why(own_plane: ControlPlane) -> None:
    own_plane.start()
    hold = own_plane.hold()
    running_id = own_plane.post(labels={"hold": "hold"})["id"]
    before = own_plane.await_state(running_id, "running")["reason"]
    own_plane.launcher.set_reachable(False)
    waiting_id = own_plane.post()["id"]
    for job_id in (running_id, waiting_id):
        await_that(lambda job_id=job_id: "the cluster has been unreachable since 20" in own_plane.job(job_id)["reason"])
        assert own_plane.job(job_id)["reason"].endswith("Z: connection refused")
    assert own_plane.job(running_id)["state"] == "running"
    for command in (["ls"], ["show", running_id]):
        output = shardyard(*command, url=own_plane.url).stdout
        assert "the cluster has been unreachable since 20" in output, command
    answer = own_plane.http.get("/v1/cluster")
    assert answer.status_code == 503
    since = own_plane.job(running_id)["reason"]
    assert answer.json()["detail"] == since, "the same time"
    doctor = json.loads(shardyard("doctor", "--json", url=own_plane.url).stdout)["findings"]
    assert [finding["detail"] for finding in doctor if finding["what"] == "cluster"] == [since]
    own_plane.kill()
    own_plane.start()  # another control plane knows since when
    own_plane.http.get("/v1/cluster")
    assert own_plane.job(running_id)["reason"] == since
    own_plane.launcher.set_reachable(True)
    await_that(lambda: own_plane.job(running_id)["reason"] == before, lambda: str(own_plane.job(running_id)))
    own_plane.await_state(waiting_id, "succeeded")
    hold.unlink()
    own_plane.await_state(running_id, "succeeded")


PATIENCE_S = 30.0


class HeldLauncher(LocalLauncher):
    """Answers `cluster` at once the first time, then only when released."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.query_event, self.release_event = threading.Event(), threading.Event()
        self._answers = iter([True])

    def cluster(self) -> ClusterFacts:
        if not next(self._answers, False):
            self.query_event.set()
            assert self.release_event.wait(PATIENCE_S)
        return super().cluster()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[HeldLauncher]:
    launcher = HeldLauncher(tmp_path / "launcher")
    launcher.set_nodes(NODE)
    yield launcher
    launcher.release_event.set()


@contextmanager
def outstanding_query(launcher: HeldLauncher, watch: ClusterWatch) -> Iterator[None]:
    """The watch has asked when this yields, and has its answer at the end."""
    assert watch.facts(0.0).calibrations == ()
    thread = threading.Thread(target=watch.facts, args=(0.0,))
    thread.start()
    assert launcher.query_event.wait(PATIENCE_S)  # the old answer is all that there is, and another one comes later
    yield
    launcher.release_event.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_measured_while_the_cluster_is_being_asked(launcher: HeldLauncher, tmp_path: Path) -> None:
    watch = ClusterWatch(launcher, tmp_path / "cache")
    with outstanding_query(launcher, watch):
        calibration: Calibration = watch.calibrate()
        assert watch.facts(0.0).calibrations == (calibration,)
    assert watch.facts(PATIENCE_S).calibrations == (calibration,)


def test_an_answer_is_not_given_again_after_the_cluster_was_found_out_of_reach(tmp_path: Path) -> None:
    launcher = local_cluster(tmp_path)
    watch = ClusterWatch(launcher)
    reach = Reachability(on_silence=watch.expire)
    assert watch.facts(PATIENCE_S).cpus == 8
    launcher.set_reachable(False)
    assert watch.facts(PATIENCE_S).cpus == 8  # nobody knows better yet

    reach.record_failure(LauncherUnavailable("no answer to a question about a job"))
    with pytest.raises(LauncherUnavailable):
        watch.facts(PATIENCE_S)


def test_an_answer_to_an_earlier_question_does_not_count_either(launcher: HeldLauncher, tmp_path: Path) -> None:
    """The question was on its way when the cluster was found to be out of reach."""
    watch = ClusterWatch(launcher, tmp_path / "cache")
    with outstanding_query(launcher, watch):
        watch.expire()
    launcher.set_reachable(False)
    with pytest.raises(LauncherUnavailable):
        watch.facts(PATIENCE_S)
