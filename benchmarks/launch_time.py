"""Time from submitting a job to its first finished step on a warm local cluster, by part, compared with bare Ray Train.

Bare Ray Train is a Ray job on the same head with an empty loop: two workers, a gloo process group, one all-reduce.
Warm means that the head is running and the corpus is prepared: the first job prepares it and is not counted.
"""

import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks import results
from moe.spec import JobSpec, read_job
from service.client import Client, ClientError
from service.head.local_head import LocalHead

EXAMPLE = Path(__file__).parents[1] / "examples" / "translate-100-to-english.yaml"
RUNS = 3
BARE = """
import os, sys, time
os.environ.update(RAY_TRAIN_V2_ENABLED="1", RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.5")
import ray, ray.train
from ray.train.torch import TorchConfig, TorchTrainer

def loop(config):
    import torch
    import torch.distributed as dist
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        open(config["done"], "w").write(repr(time.time()))

ray.init(log_to_driver=False)
TorchTrainer(
    loop, train_loop_config={"done": sys.argv[1]}, torch_config=TorchConfig(backend="gloo"),
    scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
    run_config=ray.train.RunConfig(name="bare", storage_path=sys.argv[1] + ".storage"),
).fit()
"""
"""Minimal script that does the same with Ray Train only."""

PARTS = {
    "submit": "control plane, Ray job, Python",
    "imports": "driver: imports, connecting",
    "worker_group": "worker group, process group",
    "group_ready": "workers: imports, layout",
    "data": "data (prepared)",
    "model": "model, optimizer, first batch",
    "first_step": "first step",
    "event": "its event at the client",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as (client, head):
        print(f"head up in {head_seconds(Path(folder)):.1f} s", flush=True)
        first_step(client)  # prepares the corpus
        shardyard_s, bare_s = [], []
        for _ in range(RUNS):
            shardyard_s.append(first_step(client))
            bare_s.append(bare_first_line(head, Path(folder)))
        figures = {
            "head_start_s": round(head_seconds(Path(folder)), 2),
            "limit_s": 40,
            "first_step_s": _middle([run["total"] for run in shardyard_s]),
            "bare_ray_train_s": _middle(bare_s),
            "parts_s": {part: _middle([run[part] for run in shardyard_s]) for part in PARTS},
            "runs_s": [round(run["total"], 2) for run in shardyard_s],
            "bare_runs_s": [round(seconds, 2) for seconds in bare_s],
        }
    print(f"{'submit to first finished step':<34}{figures['first_step_s']:>7.2f} s  (limit 40 s)")
    for part, words in PARTS.items():
        print(f"  {words:<32}{figures['parts_s'][part]:>7.2f} s")
    print(f"{'bare Ray Train, first line':<34}{figures['bare_ray_train_s']:>7.2f} s")
    print(f"wrote {results.write('launch_time', figures)}")


@contextmanager
def serve(folder: Path) -> Iterator[tuple[Client, LocalHead]]:
    """Run `shardyard up` with its own Ray head; yields a client and the head."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.time()
    with (folder / "up.out").open("wb") as output:
        up = subprocess.Popen(
            [sys.executable, "-m", "service.cli.main", "up", f"--port={port}", f"--state-dir={folder}",
             "--num-cpus=4", "--stop-ray"],
            stdout=output, stderr=output,
        )  # fmt: skip
    client = Client(f"http://127.0.0.1:{port}")
    try:
        while True:
            try:
                client.healthy()
                break
            except ClientError:
                if up.poll() is not None:
                    raise SystemExit((folder / "up.out").read_text()) from None
                time.sleep(0.05)
        head = LocalHead.find(folder)
        assert head is not None
        (folder / "head-seconds").write_text(str(head.state_file.stat().st_mtime - began))
        yield client, head
    except BaseException:
        print((folder / "up.out").read_text(), file=sys.stderr)
        raise
    finally:
        client.close()
        up.send_signal(signal.SIGTERM)
        up.wait()


def head_seconds(folder: Path) -> float:
    return float((folder / "head-seconds").read_text())


def first_step(client: Client, spec: JobSpec | None = None) -> dict[str, float]:
    """Seconds from submitting a job, the demo's by default, to the event of its first step, by part; the job is
    cancelled."""
    end_times: dict[str, float] = {}
    durations: dict[str, float] = {}
    submit_time = time.time()
    job = client.submit(spec or read_job(EXAMPLE))
    events = job.events()
    for event in events:
        if event.data.get("record") == "phase":
            name = event.data["name"]
            end_times[name], durations[name] = event.time.timestamp(), event.data["seconds"]
        if event.kind == "metric":
            event_time = time.time()
            break
    events.close()
    job.cancel()
    job.wait(120)
    # Each part ends at its record; the time between two records is computed here.
    return {
        **durations,
        "submit": end_times["imports"] - durations["imports"] - submit_time,
        "group_ready": end_times["data"] - durations["data"] - end_times["worker_group"],
        "event": event_time - end_times["first_step"],
        "total": event_time - submit_time,
    }


def bare_first_line(head: LocalHead, folder: Path) -> float:
    """Seconds from submitting a Ray job of an empty Ray Train loop to the loop's end on rank 0."""
    script, done_path = folder / "bare.py", folder / f"bare-{uuid.uuid4().hex}"
    script.write_text(BARE)
    headers = {"authorization": f"Bearer {head.token_path.read_text()}"}
    submit_time = time.time()
    with httpx.Client(base_url=head.dashboard_url, headers=headers, trust_env=False, timeout=60) as ray:
        entrypoint = shlex.join([sys.executable, str(script), str(done_path)])
        answer = ray.post("/api/jobs/", json={"entrypoint": entrypoint, "entrypoint_num_cpus": 0})
        id = answer.raise_for_status().json()["submission_id"]
        while (status := ray.get(f"/api/jobs/{id}").json())["status"] in ("PENDING", "RUNNING"):
            time.sleep(0.2)
    if status["status"] != "SUCCEEDED":
        raise SystemExit(f"bare Ray Train: {status}")
    return float(done_path.read_text()) - submit_time


def _middle(values: list[float]) -> Any:
    return round(statistics.median(values), 2)


if __name__ == "__main__":
    main()
