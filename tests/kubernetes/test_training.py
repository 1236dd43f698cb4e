"""A job that is posted, trains in a RayJob, loses its head and is told to end, and succeeds: all with real drivers,
workers and checkpoints."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service.client import Client
from service.run.end_notice import notice_path
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.ray_operator import RayOperator
from tests.kubernetes.up_environment import up_environment
from tests.processes import DEADLINE_S, await_that
from tests.ray.control_plane import await_checkpoint, job_spec, losses

NUM_STEPS = 60


@pytest.fixture
def operator(api_server: ApiServer, tmp_path: Path, node: Path) -> Iterator[RayOperator]:
    operator = RayOperator(api_server, tmp_path / "heads", num_cpus=2)
    operator.start()
    yield operator
    operator.stop()


@pytest.fixture
def client(api_server: ApiServer, tmp_path: Path, node: Path) -> Iterator[Client]:
    """Client of `shardyard up` with the launcher `kuberay`, whose claim is mounted at the test's folder."""
    environment = up_environment(api_server, tmp_path, state_dir=tmp_path / "state", lease_s=1)
    output = (tmp_path / "up.out").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cli.main", "up", "--port=0"],
        env={**environment, "TMPDIR": str(node)}, stdout=output, stderr=output, start_new_session=True,
    )  # fmt: skip

    def url() -> str:
        return next((line.split()[1] for line in _text(output.name).splitlines() if line.startswith("  API  ")), "")

    await_that(lambda: bool(url()) or process.poll() is not None, lambda: _text(output.name))
    assert process.poll() is None, _text(output.name)
    with Client(url()) as client:
        yield client
    process.send_signal(signal.SIGTERM)
    process.wait()
    output.close()


def _text(path: str) -> str:
    return Path(path).read_text()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_job_survives_its_head_and_an_eviction(client: Client, operator: RayOperator, node: Path) -> None:
    job = client.submit(
        job_spec(
            resources={"num_workers": 2, "gpus_per_worker": 0},
            train={"num_steps": NUM_STEPS, "batch_tokens": 1024, "evaluation": {"max_pairs": 4}},
        )
    )

    def explain() -> str:
        return f"{job.refresh().data}\n{operator.failure!r}"

    await_that(lambda: job.refresh().attempt == 1 and bool(operator.heads), explain)
    await_checkpoint(job, 10)
    _kill_head(operator)
    await_that(lambda: job.refresh().attempt == 2, explain)
    await_checkpoint(job, 20)
    # What the kubelet does first with a pod that is told to end. It waits for training everywhere on this machine.
    hook = subprocess.Popen(
        [sys.executable, "-m", "service.run.await_training_end"], env={**os.environ, "TMPDIR": str(node)}
    )
    try:
        await_that(lambda: job.refresh().attempt == 3, explain)
    finally:
        hook.kill()
        hook.wait()
        notice_path().unlink()  # the next pods have disks of their own
    assert job.wait(DEADLINE_S).state == "succeeded", explain()
    assert sorted(losses(job)) == list(range(1, NUM_STEPS + 1))
    assert job.data["failures"] == 0
    reasons = [event.data["reason"] for event in job.events() if event.kind == "state"]
    assert any("started a second time" in reason for reason in reasons)
    saved = [event.attempt for event in job.events() if event.kind == "metric"]
    steps = [event.data["step"] for event in job.events() if event.kind == "metric" and event.attempt == 3]
    before = [event.data["step"] for event in job.events() if event.kind == "metric" and event.attempt == 2]
    assert saved == sorted(saved)
    assert steps[0] == before[-1] + 1, "an eviction loses no step"


def _kill_head(operator: RayOperator) -> None:
    """SIGKILL every process of the head, its drivers and workers, as when its node is lost."""
    (head,) = operator.heads.values()
    roots = [psutil.Process(process.pid) for node in head.nodes for process in node.processes]
    for process in [*roots, *(child for root in roots for child in root.children(recursive=True))]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
