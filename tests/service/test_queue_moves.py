"""A job's place in the queue, changed by hand: first come, first served, but for who was moved."""

from itertools import pairwise

import pytest

from tests.service.control_plane import ControlPlane
from tests.service_cli.command import shardyard


@pytest.fixture
def queued(own_plane: ControlPlane) -> list[str]:
    """One job that holds the cluster until it is released, and three that wait behind it."""
    own_plane.start()
    (own_plane.folder / "cache").mkdir(exist_ok=True)
    holding = own_plane.post(labels={"step_ms": "50"}, train={"num_steps": 100_000}, resources=ALL)["id"]
    own_plane.await_state(holding, "running")
    return [holding, *(own_plane.post(labels={}, resources=ALL)["id"] for _ in range(3))]


ALL = {"num_workers": 1, "cpus_per_worker": 8}


def test_a_job_that_is_moved_to_the_front_starts_first_and_the_others_keep_their_order(
    own_plane: ControlPlane, queued: list[str]
) -> None:
    holding, a, b, c = queued
    moved = own_plane.http.post(f"/v1/jobs/{c}/move?to=first")
    assert (moved.status_code, moved.json()["state"]) == (202, "queued")
    assert own_plane.http.post(f"/v1/jobs/{a}/move?to=last").status_code == 202
    own_plane.http.post(f"/v1/jobs/{holding}/cancel")
    for job_id in (a, b, c):
        own_plane.await_state(job_id, "succeeded")
    reasons = [event.data.get("reason", "") for event in own_plane.events(c)]
    assert any(reason.startswith("moved to the front of the queue by ") for reason in reasons), reasons
    started = [own_plane.job(job_id)["started_at"] for job_id in (c, b, a)]
    assert all(before < after for before, after in pairwise(started)), started


def test_what_does_not_wait_is_not_moved(own_plane: ControlPlane, queued: list[str]) -> None:
    holding, a, *_ = queued
    refused = own_plane.http.post(f"/v1/jobs/{holding}/move?to=first")
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:shardyard:problem:conflict")
    assert own_plane.http.post(f"/v1/jobs/{a}/move?to=middle").status_code == 422
    assert own_plane.http.post(f"/v1/jobs/{a}/move").status_code == 422
    assert own_plane.http.post("/v1/jobs/job-aaaaaaaaaaaa/move?to=first").status_code == 404
    own_plane.http.post(f"/v1/jobs/{holding}/cancel")


def test_the_command(own_plane: ControlPlane, queued: list[str]) -> None:
    holding, _, b, _ = queued
    done = shardyard("move", b, "--first", url=own_plane.url)
    assert done.returncode == 0, done.stderr
    assert shardyard("move", b, url=own_plane.url).returncode == 2
    assert shardyard("move", b, "--first", "--last", url=own_plane.url).returncode == 2
    assert shardyard("move", holding, "--first", url=own_plane.url).returncode == 1
    own_plane.http.post(f"/v1/jobs/{holding}/cancel")
