"""Files taken away from under a run, of all kinds: it ends as if nothing had been."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from service.head.local_head import LocalHead
from service.wire.node_folder import spool_folder
from tests.processes import DEADLINE_S, await_that
from tests.ray.control_plane import ControlPlane, FinishedJob, await_checkpoint, entered, job_spec, losses, worker_group


@pytest.mark.slow
def test_a_run_outlives_its_spool_and_its_database(
    plane: ControlPlane, tmp_path: Path, undisturbed: FinishedJob
) -> None:
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
    await_that(lambda: [found.id for found in plane.client.jobs()] == [job.id], plane.output)
    assert job.wait(DEADLINE_S).state == "succeeded", job.data
    assert job.data["attempt"] == 1
    assert losses(job) == losses(undisturbed.job)
    assert [checkpoint["step"] for checkpoint in job.checkpoints()][-1] == 80
    events = list(job.events(redone=True))
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert [data["state"] for data in entered(events)] == ["recovering", "running", "succeeded"]


def _remove(folder: str | Path, tmp_path: Path) -> None:
    """Remove a folder that a run may be writing to: under its name it is gone at once."""
    renamed = tmp_path / f"removed-{Path(folder).name}"
    os.rename(folder, renamed)
    shutil.rmtree(renamed, ignore_errors=True)  # what is written into it meanwhile


@pytest.mark.slow
def test_a_run_outlives_its_prepared_data_and_its_storage(
    head: LocalHead, tmp_path: Path, undisturbed: FinishedJob
) -> None:
    plane = ControlPlane(head, tmp_path / "cache", tmp_path).start()
    try:
        job = plane.client.submit(job_spec(retry={"max_failures": 5}))
        first = worker_group(job)
        await_checkpoint(job, 10)
        _remove(tmp_path / "cache", tmp_path)
        await_checkpoint(job, 20)  # goes on with the data that it has open
        os.kill(first[1]["pid"], signal.SIGKILL)
        second = worker_group(job, 1)  # which prepares the data again
        await_checkpoint(job, 30)
        _remove(job.storage, tmp_path)
        os.kill(second[1]["pid"], signal.SIGKILL)  # perhaps before another checkpoint
        worker_group(job, 2)
        assert job.wait(DEADLINE_S).state == "succeeded", job.data
        assert job.data["attempt"] == 1
        # By rounding: which arithmetic is fastest for experts was measured anew, too.
        assert losses(job) == pytest.approx(losses(undisturbed.job), rel=1e-3)
        log = "\n".join(line["message"] for line in job.logs())
        assert "files of this attempt were removed" in log
    finally:
        plane.close()
