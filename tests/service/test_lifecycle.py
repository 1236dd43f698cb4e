"""Jobs from post to end, through a real control plane and real drivers; their places in the queue."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from service.control.launcher.launcher import NodeFacts
from tests.processes import await_that
from tests.service.checkpoints import commit
from tests.service.control_plane import NODE, ControlPlane
from tests.service.local_launcher import launches
from tests.service_cli.command import shardyard


@pytest.fixture
def hold(plane: ControlPlane) -> Path:
    return plane.hold()


def states(plane: ControlPlane, job_id: str) -> list[str]:
    """Each state that a job came into, in order."""
    changes = [event.data for event in plane.events(job_id) if event.kind == "state"]
    return [data["state"] for data in changes if data["state"] != data["previous"]]


def test_a_job_runs_to_its_end_and_says_so(plane: ControlPlane) -> None:
    job = plane.post(labels={"team": "research"})
    assert (job["state"], job["attempt"], job["num_steps"]) == ("queued", 0, 5)
    events = list(plane.events(job["id"]))
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    state_names = [event.data["state"] for event in events if event.kind == "state"]
    assert state_names == ["queued", "starting", "running", "succeeded"]
    assert all(event.data["reason"] and event.actor for event in events if event.kind == "state")
    assert [event.data["step"] for event in events if event.kind == "metric"] == [1, 2, 3, 4, 5]
    final_job = plane.job(job["id"])
    assert (final_job["state"], final_job["step"], final_job["result"]["report"]) == ("succeeded", 5, {"steps": 5})
    assert final_job["dashboard_url"].endswith(f"{job['id']}-a1")
    assert final_job["created_at"] <= final_job["started_at"] <= final_job["finished_at"]
    assert final_job["last_metric"]["loss"] == 2.0
    assert json.loads((Path(final_job["storage"]) / "spec.json").read_text()) == final_job["spec"]


def test_a_driver_that_dies_is_followed_by_another_attempt(plane: ControlPlane) -> None:
    job = plane.post(labels={"die_at": "3"})
    assert states(plane, job["id"]) == ["queued", "starting", "running", "recovering", "running", "succeeded"]
    final_job = plane.job(job["id"])
    assert (final_job["attempt"], final_job["failures"], final_job["step"]) == (2, 1, 5)
    reasons = [event.data["reason"] for event in plane.events(job["id"]) if event.kind == "state"]
    assert any("ended (failed) without a result: the driver is gone; failure 1 of 3" in reason for reason in reasons)
    points = plane.http.get(f"/v1/jobs/{job['id']}/metrics").json()["items"]
    assert [(point["step"], point["attempt"]) for point in points] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]


@pytest.mark.slow
def test_losses_between_checkpoints_never_add_up(plane: ControlPlane) -> None:
    job = plane.post(labels={"die_at": "2-3-4", "commits": "yes"}, retry={"max_failures": 1})
    final_job = plane.await_state(job["id"], "succeeded", "failed")
    assert (final_job["state"], final_job["attempt"], final_job["failures"]) == ("succeeded", 4, 0), final_job["reason"]
    # Without a checkpoint in between they do: three deaths at one step are one too many.
    stuck_job = plane.post(labels={"die_at": "2-2-2", "commits": "yes"}, retry={"max_failures": 1})
    final_job = plane.await_state(stuck_job["id"], "succeeded", "failed")
    assert (final_job["state"], final_job["attempt"]) == ("failed", 2)


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "no retries left": (
        {"labels": {"die_at": "1"}, "retry": {"max_failures": 0}},
        "the driver of attempt 1 ended (failed) without a result: the driver is gone; "
        "retry.max_failures (=0) is exhausted",
    ),
    "no retries of its kind left": (
        {"labels": {"die_at": "1"}, "retry": {"max_failures": 3, "kinds": {"driver": {"max_failures": 0}}}},
        "retry.kinds.driver.max_failures (=0) is exhausted",
    ),
    "another attempt would fail, too": ({"labels": {"fail": "yes"}}, ""),
    "the cluster refuses its launch": (
        {"labels": {"refuse": "yes"}}, "the cluster refused the launch: no driver of this name is allowed here",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_a_job_that_fails_after_one_attempt(plane: ControlPlane, case: str) -> None:
    changes, reason = FAILURES[case]
    job = plane.await_state(plane.post(**changes)["id"], "failed", "succeeded")
    assert (job["state"], job["attempt"], job["reason"].endswith(reason)) == ("failed", 1, True), job["reason"]


def test_a_retry_by_the_rule_of_its_kind(plane: ControlPlane) -> None:
    retry = {"max_failures": 0, "kinds": {"driver": {"max_failures": 1, "backoff": {"first_s": 0.5}}}}
    job = plane.finished_job(labels={"die_at": "1"}, retry=retry)
    assert job["attempt"] == 2
    reasons = [str(event.data["reason"]) for event in plane.events(job["id"]) if event.kind == "state"]
    assert any("failure 1 of 1 allowed of kind driver, retrying in 0.5 s" in reason for reason in reasons)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("{cluster}/read-only-storage", "cannot continue, will retry: [Errno 30] Read-only"),
        ("{storage}/attempts", "cannot read its storage"),
    ],
)
def test_storage_that_fails_for_a_moment_costs_no_job(own_plane: ControlPlane, place: str, reason: str) -> None:
    own_plane.start()
    own_plane.launcher.set_reachable(False)
    job = own_plane.post()
    in_the_way = Path(place.format(cluster=own_plane.launcher.folder, storage=job["storage"]))
    in_the_way.touch()
    own_plane.launcher.set_reachable(True)
    await_that(lambda: reason in own_plane.job(job["id"])["reason"], lambda: str(own_plane.job(job["id"])))
    in_the_way.unlink()
    assert own_plane.await_state(job["id"], "succeeded", "failed")["state"] == "succeeded"


def test_cancel_ends_a_run_at_a_step_boundary(plane: ControlPlane, hold: Path) -> None:
    job_id = plane.post(labels={"hold": hold.name})["id"]
    plane.await_state(job_id, "running")
    run = plane.driver(job_id)
    run.suspend()  # it would end on the first of these requests
    try:
        answer = plane.act(job_id, "cancel")
        assert (answer.status_code, answer.json()["request"]) == (202, "cancel")
        assert [plane.act(job_id, action).status_code for action in ("pause", "cancel")] == [409, 202]
    finally:
        run.resume()
    job = plane.await_state(job_id, "cancelled", "succeeded", "failed")
    assert (job["state"], job["request"], job["result"]["outcome"]) == ("cancelled", None, "cancelled")
    assert plane.launcher.process(f"{job_id}-a1") is None


def test_pause_frees_the_cluster_and_resume_goes_on_from_there(plane: ControlPlane, hold: Path) -> None:
    job_id = plane.post(labels={"hold": hold.name})["id"]
    plane.await_state(job_id, "running")
    answer = plane.act(job_id, "pause")
    assert (answer.status_code, answer.json()["state"]) == (202, "pausing")
    plane.await_state(job_id, "paused")
    assert plane.act(job_id, "pause").status_code == 202
    assert plane.launcher.process(f"{job_id}-a1") is None
    assert plane.http.get("/v1/cluster").json()["held"] == []
    hold.unlink()
    answer = plane.act(job_id, "resume")
    assert (answer.status_code, answer.json()["state"]) == (202, "queued")
    job = plane.await_state(job_id, "succeeded", "failed")
    assert (job["state"], job["attempt"], job["step"]) == ("succeeded", 2, 5)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_an_ended_job_goes_on_from_its_last_checkpoint(plane: ControlPlane, hold: Path, end: str) -> None:
    labels = {"die_at": "3"} if end == "failed" else {"hold": hold.name}
    job = plane.post(labels=labels, retry={"max_failures": 0})
    if end == "cancelled":
        plane.await_state(job["id"], "running")
        plane.act(job["id"], "cancel")
    assert plane.await_state(job["id"], end)["finished_at"]
    commit(job["storage"], 2)
    hold.unlink()
    answer = plane.act(job["id"], "resume")
    assert (answer.status_code, answer.json()["state"]) == (202, "queued")
    assert (answer.json()["finished_at"], answer.json()["result"]) == (None, None)
    final_job = plane.await_state(job["id"], "succeeded", "failed")
    assert (final_job["state"], final_job["attempt"], final_job["failures"], final_job["step"]) == (
        "succeeded",
        2,
        0,
        5,
    )
    assert states(plane, job["id"])[-5:] == [end, "queued", "starting", "running", "succeeded"]


@pytest.mark.parametrize("is_torn", [False, True], ids=["none", "one whose marker is torn"])
def test_an_ended_job_without_a_checkpoint_is_not_resumed(plane: ControlPlane, is_torn: bool) -> None:
    job = plane.post(labels={"die_at": "1"}, retry={"max_failures": 0})
    failed_job = plane.await_state(job["id"], "failed")
    if is_torn:
        name = commit(job["storage"], 2)
        (Path(job["storage"]) / "checkpoints" / f"{name}.commit.json").write_text("{")
    answer = plane.act(job["id"], "resume")
    assert (answer.status_code, "without a committed checkpoint" in answer.json()["detail"]) == (409, True)
    assert plane.job(job["id"]) == failed_job


def test_nothing_changes_a_finished_job(plane: ControlPlane) -> None:
    job = plane.finished_job()
    for action in ("cancel", "pause", "resume"):
        answer = plane.act(job["id"], action)
        assert answer.status_code == 409
        assert answer.json()["detail"].startswith(f"{job['id']} has succeeded; only ")
    assert plane.job(job["id"]) == job


@pytest.mark.slow
def test_a_run_that_obeys_nothing_is_ended_by_force(own_plane: ControlPlane) -> None:
    own_plane.start(cancel_deadline_s=0.3, pause_deadline_s=0.3)
    train = {"num_steps": 100_000, "batch_tokens": 1024}
    cancel_id, pause_id = (own_plane.post(labels={"deaf": "yes"}, train=train)["id"] for _ in range(2))
    for job_id, action in ((cancel_id, "cancel"), (pause_id, "pause")):
        own_plane.await_state(job_id, "running")
        assert own_plane.act(job_id, action).status_code == 202
    assert "stopped" in own_plane.await_state(cancel_id, "cancelled")["reason"]
    assert "last committed checkpoint" in own_plane.await_state(pause_id, "paused")["reason"]
    reasons = [event.data["reason"] for event in own_plane.events(cancel_id) if event.kind == "state"]
    assert "did not cancel within 0.3 s: killing its driver" in reasons


@pytest.mark.slow
def test_an_unreachable_cluster_is_no_news_about_its_jobs(own_plane: ControlPlane) -> None:
    own_plane.start()
    train = {"num_steps": 600, "batch_tokens": 1024}
    job = own_plane.post(labels={"step_ms": "2"}, train=train)
    own_plane.await_state(job["id"], "running")
    own_plane.launcher.set_reachable(False)
    waiting_job = own_plane.post()
    await_that(lambda: own_plane.http.get("/v1/cluster").status_code == 503)
    assert own_plane.http.post("/v1/plans", json=job["spec"]).status_code == 503
    # Meanwhile the run goes on to its end, and the silence changes no state.
    await_that(lambda: own_plane.launcher.process(f"{job['id']}-a1") is None)
    await_that(lambda: own_plane.job(job["id"])["step"] == 600)
    assert own_plane.job(job["id"])["state"] == "running"
    own_plane.launcher.set_reachable(True)
    assert own_plane.await_state(job["id"], "succeeded", "failed", "recovering")["state"] == "succeeded"
    own_plane.await_state(waiting_job["id"], "succeeded")
    assert own_plane.launcher.launches() == [f"{job['id']}-a1", f"{waiting_job['id']}-a1"]


def test_a_job_that_the_cluster_forgot_is_launched_anew(plane: ControlPlane, hold: Path) -> None:
    job = plane.post(labels={"hold": hold.name}, retry={"max_failures": 0})
    plane.await_state(job["id"], "running")
    plane.launcher.forget(f"{job['id']}-a1")
    await_that(lambda: plane.job(job["id"])["attempt"] == 2, lambda: f"{plane.job(job['id'])}")
    hold.unlink()
    final_job = plane.await_state(job["id"], "succeeded", "failed")
    assert (final_job["state"], final_job["attempt"], final_job["failures"]) == ("succeeded", 2, 0), final_job["reason"]


def test_gangs_wait_in_line_and_say_why(own_plane: ControlPlane) -> None:
    own_plane.launcher.set_nodes(NODE.model_copy(update={"cpus": 3}))
    own_plane.start()
    hold = own_plane.hold()
    first = own_plane.post(labels={"hold": "hold"}, resources={"num_workers": 2})
    own_plane.await_state(first["id"], "running")
    second = own_plane.post(resources={"num_workers": 2})
    third = own_plane.post(resources={"num_workers": 1})  # would fit, and does not jump the queue
    never = own_plane.post(resources={"num_workers": 4})
    expected = f"needs 2 workers of 1 CPU each; of the cluster's 3 CPUs on 1 node, {first['id']} holds 2 CPUs"
    await_that(lambda: own_plane.job(second["id"])["reason"] == expected, lambda: str(own_plane.job(second["id"])))
    assert own_plane.job(third["id"])["state"] == "queued"
    assert never["reason"] == (
        "needs 4 workers of 1 CPU each; the cluster has 3 CPUs on 1 node, room for 3 such workers"
    )
    holdings = own_plane.http.get("/v1/cluster").json()["held"]
    assert holdings == [{"job_id": first["id"], "workers": 2, "cpus_per_worker": 1, "gpus_per_worker": 0, "pool": ""}]
    hold.unlink()
    for job in (second, third):
        own_plane.await_state(job["id"], "succeeded")
    assert own_plane.job(never["id"])["state"] == "queued"
    assert own_plane.launcher.launches() == [f"{job['id']}-a1" for job in (first, second, third)]
    # A larger cluster is another chance.
    own_plane.launcher.set_nodes(NODE)
    own_plane.await_state(never["id"], "succeeded")


def test_a_job_that_never_fits_can_be_cancelled(plane: ControlPlane) -> None:
    job = plane.post(resources={"num_workers": 500})
    assert (job["state"], "room for 8 such" in job["reason"]) == ("queued", True)
    assert plane.http.get(f"/v1/jobs/{job['id']}/plan").status_code == 404
    answer = plane.http.post(f"/v1/jobs/{job['id']}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (202, "cancelled")


def test_a_range_of_workers_takes_what_there_is(plane: ControlPlane, hold: Path) -> None:
    first = plane.post(labels={"hold": hold.name}, resources={"num_workers": 5})
    plane.await_state(first["id"], "running")
    second = plane.finished_job(resources={"min_workers": 2, "max_workers": 4})
    assert plane.http.get(f"/v1/jobs/{second['id']}/plan").json()["num_workers"] == 3
    hold.unlink()
    plane.await_state(first["id"], "succeeded")


def test_pipeline_stages_take_as_many_workers_as_they_divide(plane: ControlPlane, hold: Path) -> None:
    first = plane.post(labels={"hold": hold.name}, resources={"num_workers": 5})
    plane.await_state(first["id"], "running")
    second = plane.finished_job(resources={"min_workers": 2, "max_workers": 4}, parallel={"pipeline": 2})
    plan = plane.http.get(f"/v1/jobs/{second['id']}/plan").json()
    assert (plan["num_workers"], plan["degrees"]["pipeline"]) == (2, 2)
    hold.unlink()
    plane.await_state(first["id"], "succeeded")


def test_gpus_are_used_where_there_are_any(own_plane: ControlPlane) -> None:
    gpu_node = NodeFacts(id="g", ip="10.0.0.1", cpus=8, gpus=2, memory_bytes=64 << 30, accelerator="H100")
    own_plane.launcher.set_nodes(gpu_node, gpu_node.model_copy(update={"id": "h"}))
    own_plane.start()
    job = own_plane.post(resources={"num_workers": 4})
    plan = own_plane.http.get(f"/v1/jobs/{job['id']}/plan").json()
    assert (plan["device"], plan["device_type"], plan["num_workers"]) == ("cuda", "h100", 4)
    own_plane.await_state(job["id"], "succeeded")
    launch = json.loads(launches(job["storage"], 1)[0].read_text())
    assert (launch["gpus_per_worker"], launch["plan"]) == (1, plan)
    too_many = own_plane.post(resources={"num_workers": 5})
    assert too_many["reason"] == (
        "needs 5 workers of 1 CPU and 1 GPU each; the cluster has 16 CPUs and 4 GPUs on 2 nodes, "
        "room for 4 such workers"
    )


@pytest.fixture
def queue(own_plane: ControlPlane) -> list[str]:
    """One job that holds the cluster until it is released, and three that wait behind it."""
    own_plane.start()
    (own_plane.folder / "cache").mkdir(exist_ok=True)
    holder_id = own_plane.post(labels={"step_ms": "50"}, train={"num_steps": 100_000}, resources=WHOLE_NODE)["id"]
    own_plane.await_state(holder_id, "running")
    return [holder_id, *(own_plane.post(labels={}, resources=WHOLE_NODE)["id"] for _ in range(3))]


WHOLE_NODE = {"num_workers": 1, "cpus_per_worker": 8}


@pytest.mark.slow
def test_a_job_moved_to_the_front_starts_first_and_others_keep_order(own_plane: ControlPlane, queue: list[str]) -> None:
    holder_id, a, b, c = queue
    answer = own_plane.http.post(f"/v1/jobs/{c}/move?to=first")
    assert (answer.status_code, answer.json()["state"]) == (202, "queued")
    assert own_plane.http.post(f"/v1/jobs/{a}/move?to=last").status_code == 202
    own_plane.http.post(f"/v1/jobs/{holder_id}/cancel")
    for job_id in (a, b, c):
        own_plane.await_state(job_id, "succeeded")
    reasons = [event.data.get("reason", "") for event in own_plane.events(c)]
    assert any(reason.startswith("moved to the front of the queue by ") for reason in reasons), reasons
    start_times = [own_plane.job(job_id)["started_at"] for job_id in (c, b, a)]
    assert all(before < after for before, after in pairwise(start_times)), start_times


@pytest.mark.slow
def test_what_does_not_wait_is_not_moved(own_plane: ControlPlane, queue: list[str]) -> None:
    holder_id, a, b, _ = queue
    for path, status in (
        (f"{holder_id}/move?to=first", 409), (f"{a}/move?to=middle", 422), (f"{a}/move", 422),
        ("job-aaaaaaaaaaaa/move?to=first", 404),
    ):  # fmt: skip
        assert own_plane.http.post(f"/v1/jobs/{path}").status_code == status
    for arguments, code in (((b, "--first"), 0), ((b,), 2), ((b, "--first", "--last"), 2), ((holder_id, "--first"), 1)):
        result = shardyard("move", *arguments, url=own_plane.url)
        assert result.returncode == code, result.stderr
    own_plane.act(holder_id, "cancel")
