"""Time from submitting a job to its first step, by part: on the standing Ray cluster, and on a Ray cluster of its own.

    python -m benchmarks.cluster_start [RUNS]

Both run on this machine. The own cluster is made for the job by the tests' stand-in for KubeRay, which starts a real
Ray head for each RayJob, so its part `submit` has the start of Ray too. What only a Kubernetes cluster adds is missing:
scheduling pods and pulling the image. The standing cluster has run before, and the corpus is prepared.
"""

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.launch_time import PARTS, first_step
from moe.spec import JobSpec
from service.client import Client
from service.head.local_head import LocalHead
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.ray_operator import RayOperator
from tests.kubernetes.up_environment import up_environment
from tests.ray.control_plane import job_spec

DEFAULT_RUNS = 3
CLUSTERS = {"shared": "standing cluster", "own": "cluster of its own"}


def main() -> None:
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_RUNS
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="start-") as text:
        folder = Path(text)
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        head = LocalHead.start(folder / "head", num_cpus=2)
        try:
            with ApiServer(folder) as server:
                operator = RayOperator(server, folder / "heads", num_cpus=2)
                operator.start()
                try:
                    with control_plane(folder, server, head.dashboard_url, head.token_path) as client:
                        first_step(client, spec("shared"))  # prepares the corpus
                        figures = {cluster: measure(client, cluster, num_runs) for cluster in CLUSTERS}
                finally:
                    operator.stop()
        finally:
            head.stop()
    print(f"{'seconds':<34}" + "".join(f"{words:>20}" for words in CLUSTERS.values()))
    for part, words in {"total": "submit to first step", **PARTS}.items():
        print(f"{words:<34}" + "".join(f"{figures[cluster][part]:>20.2f}" for cluster in CLUSTERS))
    print(f"wrote {results.write('cluster_start', figures)}")


def measure(client: Client, cluster: str, num_runs: int) -> dict[str, Any]:
    """Medians of the parts over some runs."""
    runs = [first_step(client, spec(cluster)) for _ in range(num_runs)]
    parts = {part: round(statistics.median(run[part] for run in runs), 2) for part in ("total", *PARTS)}
    return {**parts, "runs_s": [round(run["total"], 2) for run in runs]}


def spec(cluster: str) -> JobSpec:
    train = {"num_steps": 1_000_000, "batch_tokens": 1024}
    resources = {"num_workers": 2, "gpus_per_worker": 0, "cluster": cluster}
    return JobSpec.model_validate(job_spec(resources=resources, train=train))


@contextmanager
def control_plane(folder: Path, server: ApiServer, dashboard_url: str, token_path: Path) -> Iterator[Client]:
    """`shardyard up` with both launchers: the standing cluster is that of `dashboard_url`."""
    environment = up_environment(
        server, folder, state_dir=folder / "state", ray_dashboard_url=dashboard_url, ray_token_path=token_path
    )
    log = folder / "up.out"
    with log.open("wb") as output:
        up = subprocess.Popen(
            [sys.executable, "-m", "service.cli.main", "up", "--port=0"], env={**os.environ, **environment},
            stdout=output, stderr=output,
        )  # fmt: skip
    try:
        while (match := re.search(r"API +(http://\S+)", log.read_text())) is None:
            if up.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        with Client(match[1], token="") as client:
            yield client
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait()


if __name__ == "__main__":
    main()
