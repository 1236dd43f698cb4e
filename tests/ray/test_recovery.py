"""Processes killed in mid-run: nothing is lost, and every loss is that of an undisturbed run."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil

from service.client import Job
from service.report.events import Event
from tests.processes import DEADLINE_S, await_that
from tests.ray.control_plane import (
    ControlPlane,
    FinishedJob,
    await_checkpoint,
    driver_process,
    entered,
    job_spec,
    losses,
    worker_group,
)

AWAY_S = 10.0


def test_killed_workers_are_replaced_and_the_run_goes_on(
    plane: ControlPlane, undisturbed: FinishedJob
) -> None:
    job = plane.client.submit(job_spec())
    for number, (rank, step) in enumerate([(1, 20), (0, 30)]):
        workers = worker_group(job, number)
        await_checkpoint(job, step)
        # Rank 0 speaks for its group: what it had not sent yet is found.
        os.kill(workers[rank]["pid"], signal.SIGKILL)

    events = list(job.events())
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    changes = entered(events)
    disturbed = ["recovering", "running"] * 2
    assert [data["state"] for data in changes] == ["queued", "starting", "running", *disturbed, "succeeded"]
    reasons = [data["reason"] for data in changes if data["state"] == "recovering"]
    assert "rank 1 was lost" in reasons[0]
    assert "rank 0 was lost" in reasons[1]
    groups = _started(events)
    assert [(group.attempt, group.data["group"]) for group in groups] == [(1, 0), (1, 1), (1, 2)]
    assert groups[1].data["resumed_step"] >= 20
    assert groups[2].data["resumed_step"] >= 30
    assert losses(job.refresh()) == losses(undisturbed.job)


def test_a_killed_driver_is_followed_by_a_new_attempt(plane: ControlPlane, undisturbed: FinishedJob) -> None:
    job = plane.client.submit(job_spec())
    workers = worker_group(job)
    await_checkpoint(job, 20)
    driver = driver_process(job)
    assert not any("torch" in Path(mapped.path).name for mapped in driver.memory_maps())  # it starts sooner
    driver.kill()

    assert job.wait(DEADLINE_S).state == "succeeded", job.data
    assert job.data["attempt"] == 2
    events = list(job.events())
    second = _started(events)[1]
    assert (second.attempt, second.data["group"]) == (2, 0)
    assert second.data["resumed_step"] >= 20
    assert losses(job) == losses(undisturbed.job)
    assert not any(psutil.pid_exists(worker["pid"]) for worker in workers)


def test_training_goes_on_without_the_control_plane_until_it_is_cancelled(plane: ControlPlane) -> None:
    endless = {"num_steps": 1_000_000, "batch_tokens": 1024}  # so that it outlasts the outage on any machine
    job = plane.client.submit(job_spec(train=endless))
    events: list[Event] = []
    lost: list[Exception] = []
    reading = threading.Thread(target=_read, args=(job, events, lost))
    reading.start()
    await_checkpoint(job, 10)
    killed_at = time.time()
    plane.kill()
    time.sleep(AWAY_S)  # how long it is away is what is tested
    plane.start()
    back_at = time.time()
    await_that(lambda: bool(_metrics(events, since=back_at)), lambda: f"{events[-3:]}")
    assert job.cancel().wait(DEADLINE_S).state == "cancelled", job.data
    reading.join()

    # A cancelled run keeps the step that it was at.
    newest = job.checkpoints()[-1]
    assert newest["step"] == job.step == job.data["result"]["step"] == max(losses(job))
    assert Path(f"{job.storage}/checkpoints/{newest['name']}.commit.json").is_file()
    # The stream went on where it broke off, with nothing missing and nothing twice.
    assert lost
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert events[-1].data["state"] == "cancelled"
    metrics = _metrics(events)
    assert [event.data["step"] for event in metrics] == list(range(1, len(metrics) + 1))
    # Training never stopped: one worker group took all steps, and none waited for the control plane.
    assert len(_started(events)) == 1
    assert len(_metrics(events, since=killed_at)) - len(_metrics(events, since=back_at)) > 2


def _read(job: Job, events: list[Event], lost: list[Exception]) -> None:
    for event in job.events(on_lost=lost.append):
        events.append(event)


def _metrics(events: list[Event], since: float = 0.0) -> list[Event]:
    """The metrics of steps that were taken after a moment."""
    return [event for event in events if event.kind == "metric" and event.time.timestamp() > since]


def _started(events: list[Event]) -> list[Event]:
    return [event for event in events if event.data.get("record") == "started"]
