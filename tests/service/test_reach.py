"""A cluster that cannot be reached: said by jobs and by the API, since when and why, and not over and over."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from moe.spec import JobSpec
from service.control.launcher.launcher import LauncherUnavailable
from service.control.scheduling import job_plans, reach, starter
from service.control.scheduling.reach import REPORT_AFTER_S, REPORT_INTERVAL_S, Reach
from service.control.store.events import events_after
from service.control.store.jobs import JobRow, get_job
from service.wire.launch import Launch
from tests.processes import await_that
from tests.service.control_plane import NODE, ControlPlane, spec
from tests.service.local_launcher import LocalLauncher
from tests.service.test_crashes import DeadlyLauncher, controller_on
from tests.service_cli.command import shardyard


class HalfDead(DeadlyLauncher):
    """Answers every question, and takes no submission: a dashboard whose raylet is dead."""

    def __init__(self, launcher: LocalLauncher) -> None:
        super().__init__(launcher, call=0, after=False)

    def submit(self, launch: Launch) -> None:
        raise LauncherUnavailable("answers 500")


def test_a_cluster_that_answers_half_is_told_of_once_and_not_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Silence is told of at once, and not after three seconds, for which no test waits.
    monkeypatch.setattr(reach, "REPORT_AFTER_S", 0.0)
    cluster = LocalLauncher(tmp_path / "cluster")
    cluster.set_nodes(NODE)
    services = controller_on(tmp_path, HalfDead(cluster))
    number = services.requests.submit(JobSpec.parse(spec()), "tester")[0].number
    with capture_logs() as logged:
        for _ in range(50):
            services.controller.step()
    with services.database.read() as tx:
        job = get_job(tx, services.requests.submit(JobSpec.parse(spec()), "tester")[0].id)
        told = [event.data for event in events_after(tx, number, 0, 1000) if event.kind == "state"]
    assert job is not None
    assert [line["event"] for line in logged] == [
        "admitted", "decided", "cannot reach the cluster; jobs are left as they are",
    ]  # fmt: skip
    assert len(told) == 3, told
    assert "the cluster has been unreachable since 20" in told[-1]
    assert "answers 500" in told[-1]
    services.database.close()


class Broken(HalfDead):
    """Fails in a way that nobody foresaw."""

    def submit(self, launch: Launch) -> None:
        raise ZeroDivisionError


def test_what_fails_again_each_step_is_logged_once(tmp_path: Path) -> None:
    cluster = LocalLauncher(tmp_path / "cluster")
    cluster.set_nodes(NODE)
    services = controller_on(tmp_path, Broken(cluster))
    services.requests.submit(JobSpec.parse(spec()), "tester")
    with capture_logs() as logged:
        for _ in range(20):
            services.controller.step()
    assert [line["event"] for line in logged] == ["admitted", "decided", "could not advance a job"]
    services.database.close()


def test_a_short_silence_is_no_news_and_a_long_one_is_told_with_its_beginning() -> None:
    now = 1_700_000_000.0
    seen = Reach(clock=lambda: now)

    def step(error: str | None) -> str:
        seen.begin_step()
        if error:
            seen.record_failure(Exception(error))
        seen.end_step()
        return seen.words()

    assert step("refused") == ""
    now += REPORT_AFTER_S
    assert step("refused") == "the cluster has been unreachable since 2023-11-14T22:13:20Z: refused"
    now += 1
    assert step("request 17 failed").endswith(": refused"), "reasons that change each time are not all told"
    now += REPORT_INTERVAL_S
    assert step("request 18 failed").endswith("since 2023-11-14T22:13:20Z: request 18 failed")
    assert seen.words(reported_since=1_600_000_000).startswith("the cluster has been unreachable since 2020-09-13T")
    assert step(None) == ""
    now += 100
    assert step("refused") == "", "another silence, which began just now"


def test_the_queue_says_no_more_that_a_cluster_is_away_which_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what nobody would look at for long: behind the first that waits, and too large for this cluster."""
    # Silence is told of at once, and not after three seconds, for which no test waits.
    monkeypatch.setattr(reach, "REPORT_AFTER_S", 0.0)
    monkeypatch.setattr(starter, "FACTS_AGE_S", 0.0)
    # Four jobs wait here, more than are explained: the same as a queue longer than the hundred that it is set to.
    monkeypatch.setattr(starter, "MAX_EXPLAINED", 2)
    monkeypatch.setattr(job_plans, "FACTS_AGE_S", 0.0)
    cluster = LocalLauncher(tmp_path / "cluster")
    cluster.set_nodes(NODE)
    services = controller_on(tmp_path, cluster)

    def post(num_workers: int, **labels: str) -> str:
        given = spec(resources={"num_workers": num_workers}, labels=labels)
        return services.requests.submit(JobSpec.parse(given), "tester")[0].id

    def look() -> None:
        for _ in range(5):
            services.controller.step()

    def job(job_id: str) -> JobRow:
        with services.database.read() as tx:
            row = get_job(tx, job_id)
        assert row is not None
        return row

    too_large = post(500)
    refused = job(too_large).reason
    cluster.set_reachable(False)
    running, *waiting = [post(8, silent="yes", step_ms="100000") for _ in range(4)]
    look()
    for job_id in (too_large, running, *waiting):
        assert "waiting for its turn; the cluster has been unreachable since 20" in job(job_id).reason
    cluster.set_reachable(True)
    look()
    assert job(running).state == "starting"
    assert job(running).unreachable_since is None
    holds = f"needs 8 workers of 1 CPU each; of the cluster's 8 CPUs on 1 node, {running} holds 8 CPUs"
    reasons = [job(job_id).reason for job_id in (too_large, *waiting)]
    assert reasons == [refused, holds, "waiting for its turn", "waiting for its turn"]
    cluster.end_all()
    services.database.close()


def test_jobs_and_the_api_say_since_when_and_why(own_plane: ControlPlane) -> None:
    own_plane.start()
    hold = Path(own_plane.launcher.folder).parent / "state" / "cache" / "hold"
    hold.parent.mkdir(parents=True, exist_ok=True)
    hold.touch()
    running = own_plane.post(labels={"hold": "hold"})["id"]
    before = own_plane.await_state(running, "running")["reason"]
    own_plane.launcher.set_reachable(False)
    waiting = own_plane.post()["id"]
    for job_id in (running, waiting):
        await_that(lambda job_id=job_id: "the cluster has been unreachable since 20" in own_plane.job(job_id)["reason"])
        assert own_plane.job(job_id)["reason"].endswith("Z: connection refused")
    assert own_plane.job(running)["state"] == "running"
    for command in (["ls"], ["show", running]):
        shown = shardyard(*command, url=own_plane.url).stdout
        assert "the cluster has been unreachable since 20" in shown, command
    answer = own_plane.http.get("/v1/cluster")
    assert answer.status_code == 503
    assert "the cluster has been unreachable since 20" in answer.json()["detail"]
    since = own_plane.job(running)["reason"]
    own_plane.kill()
    own_plane.start()  # another control plane knows since when
    own_plane.http.get("/v1/cluster")
    assert own_plane.job(running)["reason"] == since
    own_plane.launcher.set_reachable(True)
    await_that(lambda: own_plane.job(running)["reason"] == before, lambda: str(own_plane.job(running)))
    own_plane.await_state(waiting, "succeeded")
    hold.unlink()
    own_plane.await_state(running, "succeeded")
