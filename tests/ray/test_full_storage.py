"""Storage that is full while a job trains: said, and no more once there is room."""

import psutil

from tests.processes import await_that
from tests.ray.control_plane import ControlPlane, await_checkpoint, job_spec, worker_group

SMALL_BYTES = 200_000
"""A file of a checkpoint is larger, one of records is not."""


def test_checkpoints_that_fail_are_told_while_the_job_runs(plane: ControlPlane) -> None:
    train = {"num_steps": 1_000_000, "batch_tokens": 1024}
    job = plane.client.submit(job_spec(train=train))
    workers = [psutil.Process(worker["pid"]) for worker in worker_group(job)]
    await_checkpoint(job, 10)
    before = workers[1].rlimit(psutil.RLIMIT_FSIZE)
    workers[1].rlimit(
        psutil.RLIMIT_FSIZE, (SMALL_BYTES, before[1])
    )  # of one rank: neither has a checkpoint then
    await_that(lambda: "the last 2 checkpoints failed" in job.refresh().reason, lambda: f"{job.data}")
    assert job.state == "running"
    kept = job.data["last_checkpoint"]["step"]
    assert "rank 1: OSError: [Errno 27] File too large" in job.reason
    assert job.reason.endswith(f"; a restart would go on from step {kept}")
    assert job.checkpoints()[-1]["step"] == kept
    workers[1].rlimit(psutil.RLIMIT_FSIZE, before)
    await_that(lambda: "failed" not in job.refresh().reason, lambda: f"{job.data}")
    assert job.data["last_checkpoint"]["step"] > kept
    assert (job.state, job.data["attempt"], job.data["failures"]) == ("running", 1, 0)
    job.cancel().wait()
