"""Files taken away from under a run, its spool and its database: it ends as if nothing had been."""

import os
import shutil
import signal

import pytest

from service.wire.node_folder import spool_folder
from tests.processes import DEADLINE_S, await_that
from tests.ray.control_plane import (
    ControlPlane,
    FinishedJob,
    await_checkpoint,
    entered,
    job_spec,
    losses,
    worker_group,
)


@pytest.mark.slow
def test_a_run_outlives_its_spool_and_its_database(plane: ControlPlane, undisturbed: FinishedJob) -> None:
    job = plane.client.submit(job_spec())
    first = worker_group(job)
    await_checkpoint(job, 10)
    shutil.rmtree(spool_folder(job.id))
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
