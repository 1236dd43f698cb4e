"""The image, built by `docker/build_unprivileged.sh` and run as the manifests say: a job trains, loses its worker's
container and its head's, and succeeds."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from k8s.node.__main__ import PROGRAMS
from tests.deploy.deployment import ROOT
from tests.deploy.running_node import RunningNode
from tests.processes import await_that
from tests.ray.control_plane import await_checkpoint, job_spec, losses

BUILD_OPTIONS = "IMAGE_BUILD_OPTIONS"
BUILD_LIMIT_S, TRAINING_LIMIT_S = 5400, 3600
NUM_STEPS = 400
IMAGE = "localhost/shardyard:test"
CONTAINERS = {"control-plane-0": "control-plane", "ray-head": "ray-head", "ray-workers-0": "ray-worker"}


@pytest.fixture(scope="module")
def built_image() -> str:
    options = os.environ.get(BUILD_OPTIONS)
    if options is None:
        pytest.skip(
            f"building an image takes many minutes; to have it built, set {BUILD_OPTIONS} to options of "
            "docker/build_unprivileged.sh, such as '--build-arg TORCH_INDEX=', or to nothing"
        )
    for program in ("mmdebstrap", *PROGRAMS):
        if shutil.which(program) is None:
            pytest.skip(f"{program}, which builds or runs the image, is not installed")
    command = [ROOT / "docker" / "build_unprivileged.sh", IMAGE, *shlex.split(options)]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUILD_LIMIT_S)
    assert run.returncode == 0, run.stdout[-4000:]
    return IMAGE


@pytest.fixture
def node(built_image: str, tmp_path: Path) -> Iterator[RunningNode]:
    if subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make network and mount namespaces")
    node = RunningNode(built_image, tmp_path, num_workers=1)
    yield node
    node.close()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(BUILD_LIMIT_S + TRAINING_LIMIT_S)
def test_a_job_in_the_image_survives_its_worker_and_its_head(node: RunningNode) -> None:
    with node.client() as client:
        assert httpx.get(f"{client.url}/v1/jobs").status_code == 401, "it has a token"
        for pod, container in CONTAINERS.items():
            _assert_confined(node.first_process(pod, container))
        job = client.submit(
            job_spec(
                parallel="auto",
                resources={"num_workers": 1, "gpus_per_worker": 0},
                train={"num_steps": NUM_STEPS, "batch_tokens": 1024, "evaluation": {"max_pairs": 4}},
            )
        )

        def explain() -> str:
            return f"{job.refresh().data}\n{node.output()}"

        await_checkpoint(job, 10)
        _kill(node, "ray-workers-0")
        await_that(lambda: job.refresh().state == "recovering", explain)
        await_that(lambda: job.refresh().state == "running", explain)
        await_checkpoint(job, job.step + 10)
        attempt = job.refresh().attempt
        _kill(node, "ray-head")
        await_that(lambda: job.refresh().attempt > attempt, explain)
        assert job.wait(TRAINING_LIMIT_S).state == "succeeded", explain()
        assert sorted(losses(job)) == list(range(1, NUM_STEPS + 1))
        assert node.num_starts("control-plane-0", "control-plane") == 1, explain()
    assert node.close() == []
    assert node.process.returncode == 0, node.output()
    containers = subprocess.run(
        ["buildah", "containers", "--format={{.ContainerName}}"], capture_output=True, text=True
    )
    assert "shardyard-node" not in containers.stdout


def _assert_confined(process: psutil.Process) -> None:
    """As Pod Security `restricted` has it: another user than root, without capabilities, under seccomp, and a root file
    system that cannot be written."""
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert status["NSpid"].split()[-1] == "1", "a PID namespace of its own"
    assert (status["CapEff"], status["CapBnd"]) == ("0" * 16, "0" * 16)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    user_map = Path(f"/proc/{process.pid}/uid_map").read_text()
    assert status["Uid"].split()[0] != "0", user_map
    mounts = [line.split() for line in Path(f"/proc/{process.pid}/mountinfo").read_text().splitlines()]
    (root,) = [fields for fields in mounts if fields[4] == "/"]
    assert "ro" in root[5].split(",")


def _kill(node: RunningNode, pod: str) -> None:
    """SIGKILL a pod's container, which the node starts again."""
    container = CONTAINERS[pod]
    starts = node.num_starts(pod, container)
    node.first_process(pod, container).kill()
    await_that(lambda: node.num_starts(pod, container) > starts, node.output)
