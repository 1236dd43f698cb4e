"""Outages that a run survives: no room in its storage, no control plane, no place on the cluster."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from service.client import Job
from service.head.local_head import LocalHead
from service.wire.events import Event
from tests.processes import DEADLINE_S, await_that
from tests.ray.control_plane import ControlPlane, await_checkpoint, job_spec, losses, worker_group

SMALL_BYTES = 200_000
"""A file of a checkpoint is larger, one of records is not."""


@pytest.mark.slow
def test_training_goes_on_without_room_and_without_the_control_plane_until_it_is_cancelled(plane: ControlPlane) -> None:
    endless = {"num_steps": 1_000_000, "batch_tokens": 1024}  # outlasts the outage on any machine
    job = plane.client.submit(job_spec(train=endless))
    events: list[Event] = []
    errors: list[Exception] = []
    reading = threading.Thread(target=_read, args=(job, events, errors))
    reading.start()
    workers = [psutil.Process(worker["pid"]) for worker in worker_group(job)]
    await_checkpoint(job, 10)

    before = workers[1].rlimit(psutil.RLIMIT_FSIZE)
    # A limit on one rank: no checkpoint is committed then.
    workers[1].rlimit(psutil.RLIMIT_FSIZE, (SMALL_BYTES, before[1]))
    await_that(
        lambda: re.search(r"the last \d+ checkpoints failed", job.refresh().reason) is not None, lambda: f"{job.data}"
    )
    assert job.state == "running"
    step = job.data["last_checkpoint"]["step"]
    assert "rank 1: OSError: [Errno 27] File too large" in job.reason
    assert job.reason.endswith(f"; a restart would resume from step {step}")
    assert job.checkpoints()[-1]["step"] == step
    workers[1].rlimit(psutil.RLIMIT_FSIZE, before)
    await_that(lambda: "failed" not in job.refresh().reason, lambda: f"{job.data}")
    assert job.data["last_checkpoint"]["step"] > step
    assert (job.state, job.data["attempt"], job.data["failures"]) == ("running", 1, 0)

    killed_at = time.time()
    plane.kill()
    names = _marker_names(job)
    await_that(lambda: not names & _marker_names(job))  # neither of the newest two is left: training went on
    plane.start()
    back_at = time.time()
    await_that(lambda: bool(_metrics(events, since=back_at)), lambda: f"{events[-3:]}")
    assert job.cancel().wait(DEADLINE_S).state == "cancelled", job.data
    reading.join()

    # A cancelled run saves its last step.
    newest = job.checkpoints()[-1]
    assert newest["step"] == job.step == job.data["result"]["step"] == max(losses(job))
    assert f"{newest['name']}.commit.json" in _marker_names(job)
    # The stream continued where it broke off, with nothing missing or repeated.
    assert errors
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert events[-1].data["state"] == "cancelled"
    metrics = _metrics(events)
    assert [event.data["step"] for event in metrics] == list(range(1, len(metrics) + 1))
    # Training never stopped: one worker group took all steps without waiting for the control plane.
    assert len([event for event in events if event.data.get("record") == "started"]) == 1
    assert len(_metrics(events, since=killed_at)) - len(_metrics(events, since=back_at)) > 2


def _marker_names(job: Job) -> set[str]:
    """Names of the markers of the checkpoints in storage."""
    return {path.name for path in Path(job.storage, "checkpoints").glob("*.commit.json")}


def _read(job: Job, events: list[Event], errors: list[Exception]) -> None:
    for event in job.events(on_lost=errors.append):
        events.append(event)


def _metrics(events: list[Event], since: float = 0.0) -> list[Event]:
    """Metrics of steps after a moment."""
    return [event for event in events if event.kind == "metric" and event.time.timestamp() > since]


@pytest.mark.slow
def test_a_job_is_cancelled_before_its_workers_are_there(head: LocalHead, plane: ControlPlane) -> None:
    with every_core_taken(head):  # by a user that this control plane does not know
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
    """All cores of the head, taken by a Ray job of the test."""
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
