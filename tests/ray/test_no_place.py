"""A cluster without a place for a job: said, and the job is cancelled meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from service.head.local_head import LocalHead
from tests.processes import DEADLINE_S, await_that
from tests.ray.control_plane import ControlPlane, job_spec


@pytest.mark.slow
def test_a_job_is_cancelled_before_its_workers_are_there(head: LocalHead, plane: ControlPlane) -> None:
    with every_core_taken(head):  # by somebody that this control plane does not know of
        job = plane.client.submit(job_spec())
        stream = job.events()
        changes = (event.data for event in stream if event.kind == "state")
        waits = next(change for change in changes if "waiting for resources" in change["reason"])
        stream.close()
        assert waits["state"] == "starting"
        assert waits["reason"] == (
            "waiting for resources for 2 workers (1 CPU each): "
            "other programs hold the cluster's resources: 0 of 6 CPUs are free"
        )
        job.cancel()
        assert job.wait(DEADLINE_S).state == "cancelled"
        assert job.reason == "cancelled while no worker group ran"


@contextmanager
def every_core_taken(head: LocalHead) -> Iterator[None]:
    """All of the head's cores belong to a Ray job of the test's own."""
    bearer = {"authorization": f"Bearer {head.token_path.read_text()}"}
    address = f"{head.dashboard_url}/api/jobs"
    with httpx.Client(base_url=address, headers=bearer, trust_env=False, timeout=DEADLINE_S) as ray:
        holder = {"entrypoint": "sleep 600", "entrypoint_num_cpus": head.num_cpus}
        path = f"/{ray.post('/', json=holder).raise_for_status().json()['submission_id']}"
        await_that(lambda: ray.get(path).json()["status"] == "RUNNING", lambda: ray.get(path).text)
        try:
            yield
        finally:
            ray.post(f"{path}/stop").raise_for_status()
            await_that(lambda: ray.get(path).json()["status"] == "STOPPED", lambda: ray.get(path).text)
