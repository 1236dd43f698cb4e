"""An API server that accepts connections and does not answer, or answers late."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.control.kubernetes.pending_requests import MAX_PENDING_OF_VERB, WAIT_S
from service.control.launcher.choice import LauncherChoice
from service.control.launcher.kuberay.launcher import KubeRayLauncher
from service.control.launcher.launcher import LauncherUnavailable, LaunchRefusal
from service.wire.launch import Result
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.apiserver.faults import Denial
from tests.kubernetes.launching import launcher_on, name_of, new_launch
from tests.kubernetes.operator import Operator
from tests.kubernetes.planes import Plane
from tests.processes import await_that
from tests.service.controllers import local_cluster
from tests.service.local_launcher import LocalLauncher

SUCCEEDED = Result(outcome="succeeded", step=5)
TIMEOUT_S = 120.0
"""Timeout of requests, longer than a test awaits anything."""


@pytest.fixture
def operator(api_server: ApiServer) -> Operator:
    return Operator(api_server)


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[LocalLauncher]:
    cluster = local_cluster(tmp_path)
    yield cluster
    cluster.end_all()


@pytest.fixture
def plane(api_server: ApiServer, standing: LocalLauncher, tmp_path: Path) -> Iterator[Plane]:
    """Control plane with both kinds of cluster, whose launcher waits as in production."""

    def both(own: KubeRayLauncher) -> LauncherChoice:
        return LauncherChoice(standing, own, default="shared")

    plane = Plane(api_server, tmp_path, both, wait_s=WAIT_S, timeout_s=TIMEOUT_S)
    yield plane
    plane.stop()


def _post(plane: Plane, cluster: str, **changes: Any) -> str:
    return plane.post(resources={"cluster": cluster}, **changes)


def test_a_server_that_hangs_holds_up_no_job_of_the_standing_cluster(
    plane: Plane, standing: LocalLauncher, operator: Operator, api_server: ApiServer
) -> None:
    running = _post(plane, "own")
    name = plane.await_launch(running)
    operator.start_cluster(name)
    operator.run(name)
    plane.await_job(running, lambda job: plane.launcher.observe(f"{running}-a1").status == "running")
    with api_server.hanging():
        launching = _post(plane, "own")
        plane.await_job(launching, lambda job: job.launch == "due")
        shared = _post(plane, "shared")
        plane.await_launch(shared)
        plane.end(shared, SUCCEEDED)
        standing.end_all()
        plane.await_job(shared, lambda job: job.state == "succeeded")
        assert plane.job(launching).launch == "due"
        assert plane.launcher.observe(f"{running}-a1").status == "running"
    assert plane.await_launch(launching) in operator.ray_jobs()
    assert plane.job(launching).attempt == 1


def test_creations_that_hang_hold_up_no_deletion(plane: Plane, operator: Operator, api_server: ApiServer) -> None:
    """As behind a webhook that does not answer."""
    cancelled = _post(plane, "own")
    name = plane.await_launch(cancelled)
    plane.await_job(cancelled, lambda job: plane.launcher.observe(f"{cancelled}-a1").status == "pending")
    api_server.fault("delay", verb="create", resource="rayjobs", count=1000, seconds=TIMEOUT_S)
    launching = _post(plane, "own")
    plane.await_job(launching, lambda job: job.launch == "due")
    plane.services.requests.cancel(cancelled, "tester")
    plane.await_job(cancelled, lambda job: job.state == "cancelled")
    assert name not in operator.ray_jobs()
    assert plane.job(launching).launch == "due"


def test_a_creation_that_hangs_holds_up_no_other_job_of_its_cluster(
    plane: Plane, operator: Operator, api_server: ApiServer
) -> None:
    api_server.fault("delay", verb="create", resource="rayjobs", count=1, seconds=TIMEOUT_S)
    launching = _post(plane, "own")
    plane.await_reason(launching, f"request to create {plane.name(launching, 1)} yet")
    other = _post(plane, "own")
    name = plane.await_launch(other)
    operator.start_cluster(name)
    operator.run(name)
    plane.await_job(other, lambda job: plane.launcher.observe(f"{other}-a1").status == "running")
    plane.end(other, SUCCEEDED)
    operator.end(name)
    plane.await_job(other, lambda job: job.state == "succeeded")
    assert (plane.job(launching).attempt, plane.job(launching).launch) == (1, "due")


def test_a_late_refusal_is_told_by_the_next_call(api_server: ApiServer, tmp_path: Path) -> None:
    launch, woken = new_launch(tmp_path), []
    launcher = launcher_on(api_server, wait_s=0.0)
    launcher.on_change(lambda: woken.append(True))
    try:
        api_server.deny(Denial("rayjobs", "images must come from registry.example", "policy.example"))
        with pytest.raises(LauncherUnavailable):
            launcher.submit(launch)
        await_that(lambda: bool(woken))
        with pytest.raises(LaunchRefusal, match=r"policy\.example"):
            launcher.submit(launch)
    finally:
        launcher.close()


def test_an_attempt_whose_creation_is_unanswered_is_not_stopped_yet(
    api_server: ApiServer, operator: Operator, tmp_path: Path
) -> None:
    """Otherwise it would be created afterwards."""
    launch = new_launch(tmp_path)
    launcher = launcher_on(api_server, wait_s=0.0, timeout_s=TIMEOUT_S)
    try:
        with api_server.hanging():
            with pytest.raises(LauncherUnavailable):
                launcher.submit(launch)
            with pytest.raises(LauncherUnavailable):
                launcher.stop(launch.submission_id)
        await_that(lambda: name_of(launch) in operator.ray_jobs())
        await_that(lambda: launcher.observe(launch.submission_id).status == "pending")
        await_that(lambda: _is_stopped(launcher, operator, launch.submission_id, name_of(launch)))
    finally:
        launcher.close()


def _is_stopped(launcher: KubeRayLauncher, operator: Operator, submission_id: str, name: str) -> bool:
    try:
        launcher.stop(submission_id)
    except LauncherUnavailable:
        return False
    return name not in operator.ray_jobs()


def test_unanswered_requests_of_a_verb_are_limited(api_server: ApiServer, tmp_path: Path) -> None:
    launcher = launcher_on(api_server, wait_s=0.0, timeout_s=TIMEOUT_S)
    api_server.fault("delay", verb="create", resource="rayjobs", count=1000, seconds=TIMEOUT_S)
    try:
        for index in range(2 * MAX_PENDING_OF_VERB):
            with pytest.raises(LauncherUnavailable):
                launcher.submit(new_launch(tmp_path / str(index)))

        def num_creations() -> int:
            return sum(request["verb"] == "create" for request in api_server.requests())

        await_that(lambda: num_creations() == MAX_PENDING_OF_VERB)
    finally:
        launcher.close()
