"""A job on Ray whose storage is a real S3 server: two workers save there, one is killed, the job resumes and ends."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.head.local_head import LocalHead
from tests.object_store.s3_server import S3Server
from tests.processes import DEADLINE_S, await_that
from tests.ray.control_plane import NUM_STEPS, ControlPlane, await_checkpoint, job_spec, losses, worker_group

pytestmark = pytest.mark.slow


@pytest.fixture
def plane(s3: S3Server, tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane with no storage but the bucket, and a head whose drivers and workers have its credentials."""
    head = LocalHead.start(tmp_path / "head", num_cpus=4)
    try:
        plane = ControlPlane(head, tmp_path / "cache", tmp_path, storage_roots='["s3://bucket/jobs"]').start()
        yield plane
        plane.close()
    finally:
        head.stop()


def test_a_job_saves_in_a_bucket_loses_a_worker_and_resumes(plane: ControlPlane, s3: S3Server) -> None:
    job = plane.client.submit(job_spec())
    await_checkpoint(job, 10)
    os.kill(worker_group(job)[1]["pid"], signal.SIGKILL)
    assert job.wait(DEADLINE_S).state == "succeeded", job.data
    assert sorted(losses(job)) == list(range(1, NUM_STEPS + 1))
    resumed = [event.data for event in job.events() if event.data.get("record") == "resumed"]
    assert [data["group"] for data in resumed] == [0, 1]
    assert resumed[-1]["step"] >= 10
    newest = job.checkpoints()[-1]
    prefix = f"jobs/{job.id}/checkpoints/{newest['name']}/"
    assert {f"{prefix}__0_0.distcp", f"{prefix}__1_0.distcp"} <= set(s3.list_keys(prefix))
    assert any("checkpoint of step" in line["message"] for line in job.logs())  # from the bucket
    assert not [key for key in s3.list_keys() if key.endswith("/")], "no marks of folders"
    job.delete()
    await_that(lambda: s3.list_keys() == [], lambda: f"{s3.list_keys()}")
