"""The image on one machine, run as the manifests say: `python -m benchmarks.built_image IMAGE`.

Seconds until the pods are ready, from submitting a job to its first step, and from the SIGKILL of a container to the
next new step; and the most memory of each pod, as the kubelet counts it. `docker/build_unprivileged.sh` has built the
image; the control plane, Ray's head and one worker are those of the overlay `local`, with their limits.
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.launch_time import PARTS, first_step
from moe.spec import JobSpec
from service.client import Client, Job
from tests.deploy.running_node import RunningNode
from tests.ray.control_plane import job_spec

CONTAINERS = {"control-plane-0": "control-plane", "ray-head": "ray-head", "ray-workers-0": "ray-worker"}
SAMPLE_INTERVAL_S = 0.5
READY = re.compile(r"^ *([\d.]+) s  (\S+): ready", re.MULTILINE)


class WorkingSets(threading.Thread):
    """Most memory of each pod's container: what its control group uses, less file pages that can be dropped."""

    def __init__(self, node: RunningNode) -> None:
        super().__init__(daemon=True)
        self._node, self._stopping = node, threading.Event()
        self.most_bytes = dict.fromkeys(CONTAINERS, 0)

    def run(self) -> None:
        while not self._stopping.wait(SAMPLE_INTERVAL_S):
            for pod, container in CONTAINERS.items():
                try:
                    process = self._node.first_process(pod, container)
                    self.most_bytes[pod] = max(self.most_bytes[pod], working_set_bytes(process.pid))
                except (AssertionError, OSError, ValueError):  # it has not started, or is being started again
                    continue

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def working_set_bytes(pid: int) -> int:
    groups = dict(line.split(":", 2)[1:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
    if "memory" in groups:
        folder = Path(f"/sys/fs/cgroup/memory{groups['memory']}")
        usage, inactive = "memory.usage_in_bytes", "total_inactive_file"
    else:
        folder, usage, inactive = Path(f"/sys/fs/cgroup{groups['']}"), "memory.current", "inactive_file"
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int((folder / usage).read_text()) - int(statistics[inactive])


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m benchmarks.built_image IMAGE", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        node = RunningNode(sys.argv[1], Path(folder), num_workers=1)
        working_sets = WorkingSets(node)
        working_sets.start()
        try:
            with node.client() as client:
                figures = measure(node, client)
        finally:
            working_sets.stop()
            node.close()
    figures["most_memory_bytes"] = working_sets.most_bytes
    figures["image_bytes"] = image_bytes(sys.argv[1])
    print(json.dumps(figures, indent=1))
    print(f"wrote {results.write('built_image', figures)}")
    return 0


def measure(node: RunningNode, client: Client) -> dict[str, Any]:
    ready_s = {pod: float(seconds) for seconds, pod in READY.findall(node.output())}
    first_step(client, JobSpec.model_validate(spec()))  # prepares the corpus
    parts = first_step(client, JobSpec.model_validate(spec()))
    job = client.submit(spec())
    recovery_s = {pod: recovery(node, job, pod) for pod in ("ray-workers-0", "ray-head")}
    job.cancel()
    job.wait()
    return {
        "ready_s": ready_s,
        "first_step_s": round(parts["total"], 1),
        "parts_s": {part: round(parts[part], 2) for part in PARTS},
        "recovery_s": recovery_s,
    }


def spec() -> dict[str, Any]:
    train = {"num_steps": 1_000_000, "batch_tokens": 1024}
    return job_spec(parallel="auto", resources={"num_workers": 1, "gpus_per_worker": 0}, train=train)


def recovery(node: RunningNode, job: Job, pod: str) -> dict[str, float]:
    """Seconds from a container's SIGKILL until the job is recovering, and until a step is done that was not before."""
    _await(lambda: job.refresh().state == "running" and len(job.checkpoints()) > 0)
    start_step = job.step
    _await(lambda: job.refresh().step >= start_step + 20)
    killed = time.monotonic()
    node.first_process(pod, CONTAINERS[pod]).kill()
    _await(lambda: job.refresh().state == "recovering")
    noticed_s, last_step = time.monotonic() - killed, job.step
    _await(lambda: job.refresh().state == "running" and job.step > last_step)
    return {"noticed_s": round(noticed_s, 1), "next_step_s": round(time.monotonic() - killed, 1)}


def _await(condition: Any) -> None:
    while not condition():
        time.sleep(0.1)


def image_bytes(image: str) -> int:
    """Size of an image without compression, as buildah counts it."""
    run = subprocess.run(["buildah", "images", "--json", image], capture_output=True, text=True, check=True)
    amount, unit = json.loads(run.stdout)[0]["size"].split()
    return int(float(amount) * {"MB": 10**6, "GB": 10**9}[unit])


if __name__ == "__main__":
    sys.exit(main())
