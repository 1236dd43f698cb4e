"""Drivers and workers stopped (SIGSTOP) while they prepare, train and evaluate: each is named, and the job
continues."""

import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import pytest

from service.client import Job
from service.head.local_head import LocalHead
from service.wire.events import Event
from tests.processes import DEADLINE_S, await_that
from tests.ray.control_plane import (
    NUM_STEPS,
    ControlPlane,
    FinishedJob,
    await_checkpoint,
    driver_process,
    job_spec,
    losses,
    worker_group,
)

NOTICED_S = 45.0
"""Twenty of them it may be silent; the rest is for a busy machine."""
ENDED_S = 75.0
"""Thirty of them it may be silent; Ray takes three to end it, and its workers end after it."""


@pytest.mark.slow
def test_each_stopped_worker_costs_a_worker_group(
    head: LocalHead, plane: ControlPlane, reference_job: FinishedJob
) -> None:
    stopped_at = {}
    job = plane.client.submit(job_spec(retry={"max_failures": 5}))
    stopped_at[0] = _stop(_await_worker_process(head).pid)  # it is about to import torch, or does

    group = worker_group(job)
    await_checkpoint(job, 20)
    stopped_at[1] = _stop(group[1]["pid"])
    group = worker_group(job, 1)
    await_that(lambda: job.refresh().step == NUM_STEPS)
    stopped_at[2] = _stop(group[0]["pid"])

    assert job.wait(DEADLINE_S).state == "succeeded", job.data
    assert losses(job) == losses(reference_job.job)
    recoveries = [event for event in job.events() if event.data.get("record") == "recovering"]
    assert [event.data["at_start"] for event in recoveries] == [True, False, False]
    for event, rank, number in zip(recoveries[1:], (1, 0), (1, 2), strict=True):
        assert event.data["kind"] == "hung"
        assert f"rank {rank} was killed: no heartbeat for " in event.data["reason"]
        assert "is stopped by a signal (SIGSTOP)" in event.data["reason"]
        assert _seconds_after(event, stopped_at[number]) < NOTICED_S
    log = "\n".join(line["message"] for line in job.logs())
    assert log.count("its stack:") == 3
    assert "train_worker" in log  # a frame of the stack


@pytest.mark.slow
def test_a_stopped_driver_is_ended_also_by_a_service_that_began_after_it_was_stopped(plane: ControlPlane) -> None:
    spec = job_spec(retry={"max_failures": 5})
    spec["train"] |= {"num_steps": 100_000}  # training goes on without a driver
    job = plane.client.submit(spec)
    stopped_at = []
    for attempt in (1, 2):
        worker_group(job, attempt=attempt)
        await_checkpoint(job, 10 * attempt)
        driver = driver_process(job)
        driver.send_signal(signal.SIGSTOP)
        stopped_at.append(time.time())
        if attempt == 2:
            plane.kill()
            plane.start()
        await_that(partial(_is_past, job, attempt), lambda: f"{job.data}")
        assert not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE
    worker_group(job, attempt=3)
    await_that(lambda: "resumed" in _records(job, 3))
    job.cancel()
    assert job.wait(DEADLINE_S).state == "cancelled", job.data

    events = [event for event in job.events() if "the frozen driver of" in event.data.get("reason", "")]
    assert [event.attempt for event in events] == [1, 2]
    for event, moment in zip(events, stopped_at, strict=True):
        assert _seconds_after(event, moment) < ENDED_S
    assert [_records(job, attempt)["resumed"]["step"] >= 10 for attempt in (2, 3)] == [True, True]


def _is_past(job: Job, attempt: int) -> bool:
    return job.refresh().attempt > attempt


def _records(job: Job, attempt: int) -> dict[str, dict[str, Any]]:
    """Records of an attempt about its start, by kind."""
    last = int(job.refresh().data["last_event_id"])
    events = itertools.takewhile(lambda event: event.id < last, job.events())
    return {event.data["record"]: event.data for event in events if event.attempt == attempt and "record" in event.data}


def _stop(pid: int) -> float:
    os.kill(pid, signal.SIGSTOP)
    return time.time()


def _await_worker_process(head: LocalHead) -> psutil.Process:
    """The first worker process found. A later search may miss it: while Ray renames a process, it has no command
    line."""
    workers: list[psutil.Process] = []

    def is_there() -> bool:
        workers.extend(_worker_processes(head))
        return bool(workers)

    await_that(is_there)
    return workers[0]


def _worker_processes(head: LocalHead) -> Iterator[psutil.Process]:
    """Ray Train's worker processes on the head."""
    for node in head.nodes:
        for process in node.processes:
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if any("RayTrainWorker" in part for part in child.cmdline()):
                        yield child


def _seconds_after(event: Event, moment: float) -> float:
    return event.time.timestamp() - moment
