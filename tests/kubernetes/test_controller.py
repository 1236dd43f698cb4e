"""Jobs with a Ray cluster of their own: their states, reasons and attempts as the cluster's objects change."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.control.api.plans import post_calibration
from service.control.errors import Conflict
from service.control.kubernetes import RAY_JOBS
from service.control.launcher.choice import LauncherChoice
from service.control.launcher.kuberay.launcher import POSTPONED_S, KubeRayLauncher
from service.control.report.failure_history import read_failures
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Result
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.apiserver.faults import Denial
from tests.kubernetes.operator import Operator
from tests.kubernetes.planes import Plane
from tests.processes import await_that
from tests.service.controllers import DeadlyLauncher, SimulatedKill, local_cluster, submit_job

SUCCEEDED = Result(outcome="succeeded", step=5)


@pytest.fixture
def operator(shared_server: ApiServer) -> Operator:
    return Operator(shared_server)


@pytest.fixture
def plane(shared_server: ApiServer, tmp_path: Path) -> Iterator[Plane]:
    yield from _plane(shared_server, tmp_path)


@pytest.fixture
def queued_plane(shared_server: ApiServer, tmp_path: Path) -> Iterator[Plane]:
    """Control plane whose jobs Kueue admits."""
    yield from _plane(shared_server, tmp_path, queue="gpus")


def _plane(server: ApiServer, folder: Path, **settings: Any) -> Iterator[Plane]:
    plane = Plane(server, folder, **settings)
    yield plane
    plane.stop()
    server.heal()
    server.deny()


def test_a_job_says_what_its_cluster_waits_for_and_succeeds(plane: Plane, operator: Operator) -> None:
    job_id = plane.post()
    name = plane.await_launch(job_id)
    plane.await_reason(job_id, "KubeRay operator")
    operator.start_cluster(name)
    job = plane.await_reason(job_id, f"{name}-head-0")
    assert (job.state, job.dashboard_url) == ("starting", None)
    operator.run(name)
    plane.end(job_id, SUCCEEDED)
    operator.end(name)
    job = plane.await_job(job_id, lambda job: job.state == "succeeded")
    assert (job.attempt, job.failures) == (1, 0)


def test_a_preempted_job_goes_on_in_another_attempt(queued_plane: Plane, operator: Operator) -> None:
    """The old RayJob is deleted, since Kueue would start it again; no failure is counted."""
    plane = queued_plane
    job_id = plane.post()
    name = plane.await_launch(job_id)
    operator.queue(name, "insufficient unused quota")
    plane.await_reason(job_id, "insufficient unused quota")
    operator.admit(name)
    operator.start_cluster(name)
    operator.run(name)
    plane.await_job(job_id, lambda job: plane.launcher.observe(f"{job_id}-a1").status == "running")
    plane.end(job_id, Result(outcome="preempted", step=3, message="its pod ends"))
    operator.evict(name, "Preempted", "preempted by another workload")
    plane.await_reason(job_id, "preempted by another workload")
    operator.finish_suspension(name)
    second = plane.await_launch(job_id, attempt=2)
    job = plane.job(job_id)
    assert (job.failures, read_failures(job.losses, job.failures).setbacks) == (0, ())
    await_that(lambda: name not in operator.ray_jobs())
    assert operator.ray_jobs()[second]["spec"]["suspend"] is True


@pytest.mark.parametrize(("request_", "state"), [("cancel", "cancelled"), ("pause", "paused")])
def test_a_job_in_kueues_queue_obeys_at_once(
    queued_plane: Plane, operator: Operator, request_: str, state: str
) -> None:
    plane = queued_plane
    job_id = plane.post()
    name = plane.await_launch(job_id)
    operator.queue(name, "insufficient unused quota")
    plane.await_reason(job_id, "insufficient unused quota")
    assert plane.services.controller.is_queued_elsewhere(job_id, 1)
    getattr(plane.services.requests, request_)(job_id, "tester")
    plane.await_job(job_id, lambda job: job.state == state)
    assert not plane.services.controller.is_queued_elsewhere(job_id, 1)
    await_that(lambda: name not in operator.ray_jobs())


def test_a_backoff_holds_up_no_job_of_kueues_queue(queued_plane: Plane, operator: Operator) -> None:
    plane = queued_plane
    retry = {"max_failures": 1, "backoff": {"first_s": 3600.0, "max_s": 3600.0}}
    failing = submit_job(plane.services, retry=retry, resources={"num_workers": 1}).id
    name = plane.await_launch(failing)
    operator.queue(name, "insufficient unused quota")
    operator.admit(name)
    operator.start_cluster(name)
    operator.run(name)
    operator.end(name, "FAILED", "Job entrypoint command failed with exit code 1. No logs available.", "AppFailed")
    plane.await_job(failing, lambda job: job.retry_at is not None)
    plane.await_launch(plane.post())
    assert plane.job(failing).attempt == 1


def test_a_launch_that_arrives_after_the_cancel_has_no_driver(plane: Plane) -> None:
    """A control plane that was slow to launch, and has lost its lease meanwhile, may still do it."""
    plane.stop()
    plane.start(lambda launcher: DeadlyLauncher(launcher, call=2))  # the first call observes, the second launches
    job_id = plane.post()
    with pytest.raises(SimulatedKill):
        plane.await_launch(job_id)
    plane.restart()
    plane.services.requests.cancel(job_id, "tester")
    job = plane.await_job(job_id, lambda job: job.state == "cancelled")
    assert not AttemptFolder(job.storage, 1).claim_driver()


def test_kueue_decides_which_of_its_jobs_run(queued_plane: Plane, operator: Operator) -> None:
    """Three jobs of the whole pool each are all in its queue; one that the pool never holds is not."""
    plane = queued_plane
    job_ids = [plane.post(resources={"num_workers": 4}, train={"num_steps": 5, "batch_tokens": 4096}) for _ in "abc"]
    too_large = plane.post(resources={"num_workers": 5})
    for job_id in job_ids:
        plane.await_launch(job_id)
    job = plane.job(too_large)
    assert (job.state, job.attempt) == ("queued", 0)
    assert "room for 4" in job.reason


def test_without_kueue_jobs_wait_for_the_pool(plane: Plane, operator: Operator) -> None:
    large = {"resources": {"num_workers": 4}, "train": {"num_steps": 5, "batch_tokens": 4096}}
    first, second = plane.post(**large), plane.post(**large)
    name = plane.await_launch(first)
    assert plane.await_reason(second, first).state == "queued"
    plane.end(first, SUCCEEDED)
    operator.start_cluster(name)
    operator.end(name)
    plane.await_launch(second)


def test_a_driver_that_fails_counts_and_its_last_output_is_stored(plane: Plane, operator: Operator) -> None:
    job_id = plane.post()
    name = plane.await_launch(job_id)
    operator.start_cluster(name)
    operator.run(name)
    output = "Traceback\nMemoryError: no room"
    message = (
        f"Job entrypoint command failed with exit code 1, last available logs (truncated to 20,000 chars):\n{output}"
    )
    operator.end(name, "FAILED", message, "AppFailed")
    plane.await_launch(job_id, attempt=2)
    job = plane.job(job_id)
    assert job.failures == 1
    (log,) = Path(job.storage, "logs").glob("*/*.log")
    assert "MemoryError: no room" in log.read_text()


def test_a_rayjob_deleted_by_hand_is_another_attempt_and_no_failure(
    plane: Plane, operator: Operator, shared_server: ApiServer
) -> None:
    job_id = plane.post()
    name = plane.await_launch(job_id)
    operator.start_cluster(name)
    operator.run(name)
    plane.await_job(job_id, lambda job: plane.launcher.observe(f"{job_id}-a1").status == "running")
    shared_server.admin("DELETE", RAY_JOBS, name)
    second = plane.await_launch(job_id, attempt=2)
    job = plane.job(job_id)
    assert job.failures == 0
    assert second in operator.ray_jobs()
    assert not AttemptFolder(job.storage, 1).claim_driver(), "a late launch of the first would have no driver"


def test_a_denied_job_fails_and_one_beyond_a_quota_waits(plane: Plane, shared_server: ApiServer) -> None:
    shared_server.deny(Denial("rayjobs", "images must come from registry.example", "policy.example"))
    job = plane.await_job(plane.post(), lambda job: job.state == "failed")
    assert "policy.example" in job.reason
    shared_server.deny(Denial("rayjobs", "exceeded quota: jobs, requested: 1, used: 9, limited: 9"))
    job_id = plane.post()
    assert plane.await_reason(job_id, "used: 9, limited: 9").state == "starting"
    shared_server.deny()
    plane.clock.offset_s += POSTPONED_S
    plane.await_launch(job_id)


def test_measuring_clusters_of_jobs_own_is_refused_with_what_to_do(plane: Plane, operator: Operator) -> None:
    """The jobs that run there are not the reason."""
    plane.await_launch(plane.post())
    before = operator.ray_jobs().keys()
    with pytest.raises(Conflict) as refusal:
        post_calibration(plane.services, None)
    for remedy in ("SHARDYARD_KUBERAY_WARM_NODES", "SHARDYARD_RAY_DASHBOARD_URL", "parallel.auto"):
        assert remedy in str(refusal.value)
    assert "held its resources" not in str(refusal.value)
    assert operator.ray_jobs().keys() == before


def test_a_deleted_job_leaves_no_objects(plane: Plane, operator: Operator) -> None:
    job_id = plane.post()
    name = plane.await_launch(job_id)
    operator.start_cluster(name)
    operator.run(name)
    plane.end(job_id, SUCCEEDED)
    operator.end(name)
    plane.await_job(job_id, lambda job: job.state == "succeeded")
    assert name in operator.ray_jobs()
    plane.services.deletions.ask(job_id, "tester")
    await_that(lambda: plane.services.controller.step() or name not in operator.ray_jobs())
    await_that(lambda: not any(pod.startswith(name) for pod in operator.pods()))


def test_a_job_that_waits_for_one_cluster_holds_up_none_for_the_other(
    shared_server: ApiServer, operator: Operator, tmp_path: Path
) -> None:
    plane = Plane(shared_server, tmp_path)
    plane.stop()
    standing = local_cluster(tmp_path)

    def both(own: KubeRayLauncher) -> LauncherChoice:
        return LauncherChoice(standing, own, default="shared")

    plane.start(both)
    try:
        large = {"num_workers": 8, "cluster": "shared"}  # all of the standing cluster
        train = {"num_steps": 5, "batch_tokens": 8192}
        plane.services.settings.cache_dir.mkdir(parents=True, exist_ok=True)
        (plane.services.settings.cache_dir / "hold").touch()
        holder = plane.post(resources=large, train=train, labels={"hold": "hold"})
        waits = plane.post(resources=large, train=train)
        own = plane.post(resources={"cluster": "own"})
        name = plane.await_launch(own)
        assert name in operator.ray_jobs()
        assert plane.job(waits).state == "queued"
        assert standing.launches() == [f"{holder}-a1"]
        plane.end(own, SUCCEEDED)
        operator.start_cluster(name)
        operator.end(name)
        plane.await_job(own, lambda job: job.state == "succeeded")
    finally:
        plane.stop()
        standing.end_all()
