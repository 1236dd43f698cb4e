"""Runs that end before their last step: paused and resumed, cancelled, diverged. (One that is cancelled while it
trains ends test_recovery.py's run without a control plane.)"""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from service.launch.local_head import LocalHead
from tests.processes import DEADLINE_S, await_that
from tests.ray.control_plane import (
    ControlPlane,
    FinishedJob,
    await_checkpoint,
    job_spec,
    losses,
    worker_group,
)


def test_a_paused_job_goes_on_where_it_was(plane: ControlPlane, undisturbed: FinishedJob) -> None:
    job = plane.client.submit(job_spec())
    worker_group(job)
    await_checkpoint(job, 10)
    job.pause()
    await_that(lambda: job.refresh().state == "paused", lambda: str(job.data))
    paused_at = job.step
    assert 10 < paused_at < 60
    assert job.checkpoints()[-1]["step"] == paused_at
    job.resume()
    assert job.wait(DEADLINE_S).state == "succeeded", job.data
    assert job.data["attempt"] == 2
    assert losses(job) == losses(undisturbed.job)


def test_a_job_is_cancelled_before_its_workers_are_there(head: LocalHead, plane: ControlPlane) -> None:
    with every_core_taken(head):  # by somebody that this control plane does not know of
        job = plane.client.submit(job_spec())
        stream = job.events()
        changes = (event.data for event in stream if event.kind == "state")
        waits = next(change for change in changes if "waits for a place" in change["reason"])
        stream.close()
        assert waits["state"] == "starting"
        assert waits["reason"] == (
            "waits for a place for 2 workers of 1 CPU each: "
            "others than this service's jobs hold the cluster's resources: 0 of 6 CPUs are free"
        )
        job.cancel()
        assert job.wait(DEADLINE_S).state == "cancelled"
        assert job.reason == "cancelled while no worker group ran"


def test_a_loss_that_is_no_number_ends_the_job_at_once(plane: ControlPlane) -> None:
    optimizer = {"name": "adamw", "peak_lr": 100, "weight_decay": 1e30}
    schedule = {"warmup_steps": 0, "decay": "constant"}
    train = {"num_steps": 40, "batch_tokens": 1024, "optimizer": optimizer, "schedule": schedule}
    job = plane.client.submit(job_spec(train=train))
    assert job.wait(DEADLINE_S).state == "failed"
    assert "is not finite" in job.reason
    assert "the last good checkpoint is" in job.reason
    assert job.data["attempt"] == 1
    started = [event for event in job.events() if event.data.get("record") == "started"]
    assert len(started) == 1  # another group would have come to the same end


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
