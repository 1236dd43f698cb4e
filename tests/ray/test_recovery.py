"""Processes killed and files removed during a run: nothing is lost, and losses equal those of an undisturbed run."""

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from service.head.local_head import LocalHead
from service.wire.events import Event
from service.wire.node_folder import spool_folder
from tests.processes import DEADLINE_S, await_that
from tests.ray.control_plane import (
    NUM_STEPS,
    ControlPlane,
    FinishedJob,
    await_checkpoint,
    driver_process,
    job_spec,
    losses,
    state_changes,
    worker_group,
)


@pytest.mark.slow
def test_a_run_goes_on_after_a_pause_and_after_kills_of_its_parts(
    plane: ControlPlane, reference_job: FinishedJob
) -> None:
    """One run with all disturbances; its events show each."""
    job = plane.client.submit(job_spec())
    worker_group(job)
    await_checkpoint(job, 10)
    job.pause()
    await_that(lambda: job.refresh().state == "paused", lambda: str(job.data))
    paused_at = job.step
    assert 10 < paused_at < NUM_STEPS
    assert job.checkpoints()[-1]["step"] == paused_at
    job.resume()

    workers = worker_group(job, attempt=2)
    await_checkpoint(job, 20)
    driver = driver_process(job)
    assert not any("torch" in Path(region.path).name for region in driver.memory_maps())  # so that it starts faster
    driver.kill()

    for number, (rank, step) in enumerate([(1, 30), (0, 40)]):
        group = worker_group(job, number, attempt=3)
        await_checkpoint(job, step)
        # Rank 0 reports for its group: its unsent records are recovered.
        os.kill(group[rank]["pid"], signal.SIGKILL)

    assert job.wait(DEADLINE_S).state == "succeeded", job.data
    assert losses(job) == losses(reference_job.job)
    events = list(job.events(redone=True))  # the last steps of a killed group may arrive late
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    groups = _start_events(events)
    places = [(group.attempt, group.data["group"]) for group in groups]
    assert places == [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)]
    resume_steps = [event.data["step"] for event in events if event.data.get("record") == "resumed"]
    assert resume_steps[:2] == [0, paused_at]
    assert all(step >= minimum for step, minimum in zip(resume_steps[2:], (20, 30, 40), strict=True))
    changes = state_changes(events)
    assert [data["state"] for data in changes][-5:] == [*["recovering", "running"] * 2, "succeeded"]
    reasons = [data["reason"] for data in changes if data["state"] == "recovering"][-2:]
    assert "rank 1 was lost" in reasons[0]
    assert "rank 0 was lost" in reasons[1]
    assert not any(psutil.pid_exists(worker["pid"]) for worker in workers)  # they ended with their driver


def _start_events(events: list[Event]) -> list[Event]:
    return [event for event in events if event.data.get("record") == "started"]


@pytest.mark.slow
def test_a_run_outlives_its_spool_and_database(plane: ControlPlane, tmp_path: Path, reference_job: FinishedJob) -> None:
    job = plane.client.submit(job_spec())
    first = worker_group(job)
    await_checkpoint(job, 10)
    _remove(spool_folder(job.id), tmp_path)
    await_checkpoint(job, 20)
    os.kill(first[1]["pid"], signal.SIGKILL)
    worker_group(job, 1)
    await_checkpoint(job, 30)

    plane.kill()
    for path in (plane.folder / "state").glob("shardyard.db*"):
        path.rename(path.with_name(f"lost-{path.name}"))
    plane.start()
    await_that(lambda: [entry.id for entry in plane.client.jobs()] == [job.id], plane.output)
    assert job.wait(DEADLINE_S).state == "succeeded", job.data
    assert job.data["attempt"] == 1
    assert losses(job) == losses(reference_job.job)
    assert [checkpoint["step"] for checkpoint in job.checkpoints()][-1] == 80
    events = list(job.events(redone=True))
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert [data["state"] for data in state_changes(events)] == ["recovering", "running", "succeeded"]


def _remove(folder: str | Path, tmp_path: Path) -> None:
    """Remove a folder that a run may be writing to; its name is gone at once."""
    new_path = tmp_path / f"removed-{Path(folder).name}"
    os.rename(folder, new_path)
    shutil.rmtree(new_path, ignore_errors=True)  # ignores files written meanwhile


@pytest.mark.slow
def test_a_run_outlives_its_data_and_storage(head: LocalHead, tmp_path: Path, reference_job: FinishedJob) -> None:
    plane = ControlPlane(head, tmp_path / "cache", tmp_path).start()
    try:
        job = plane.client.submit(job_spec(retry={"max_failures": 5}))
        first = worker_group(job)
        await_checkpoint(job, 10)
        _remove(tmp_path / "cache", tmp_path)
        await_checkpoint(job, 20)  # continues with its open data files
        os.kill(first[1]["pid"], signal.SIGKILL)
        second = worker_group(job, 1)  # which prepares the data again
        await_checkpoint(job, 30)
        _remove(job.storage, tmp_path)
        os.kill(second[1]["pid"], signal.SIGKILL)  # perhaps before another checkpoint
        worker_group(job, 2)
        assert job.wait(DEADLINE_S).state == "succeeded", job.data
        assert job.data["attempt"] == 1
        # Up to rounding: the fastest arithmetic for experts was measured again, too.
        assert losses(job) == pytest.approx(losses(reference_job.job), rel=1e-3)
        log = "\n".join(line["message"] for line in job.logs())
        assert "files of this attempt were removed" in log
    finally:
        plane.close()
