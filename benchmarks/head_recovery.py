"""Time from the death of a Ray head's GCS or raylet during a job to the job's next finished step, by part.

`shardyard up` restarts the head, and the job continues from its last checkpoint, at most twenty steps old.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.launch_time import EXAMPLE, serve
from moe.spec import read_job
from service.client import Client, Job
from service.head.local_head import LocalHead

PARTS = ("gcs_server", "raylet")
PATIENCE_S = 300.0


def main() -> None:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as (client, _):
        job = client.submit(endless())
        for part in PARTS:
            figures[part] = recovery(client, job, Path(folder), part)
            text = "  ".join(f"{name} {value}" for name, value in figures[part].items())
            print(f"{part:<12}{text}", flush=True)
        job.cancel()
        job.wait(PATIENCE_S)
    print(f"wrote {results.write('head_recovery', figures)}")


def endless() -> dict[str, Any]:
    """The demo's job with three languages and a million steps."""
    spec = read_job(EXAMPLE).model_dump(mode="json", exclude_unset=True)
    return spec | {
        "data": {"corpus": "catalogs", "languages": ["de", "fr", "uk"]},
        "train": {"num_steps": 1_000_000, "batch_tokens": 1024},
        "checkpoint": {"every_steps": 20, "keep": 2},
        "retry": {"max_failures": 0},
    }


def recovery(client: Client, job: Job, folder: Path, part: str) -> dict[str, Any]:
    """Seconds from the SIGKILL of one process until the job left `running`, the new head ran, the next attempt was
    launched and its first step was recorded; and the seconds of each phase of that attempt's start."""
    _await(lambda: job.refresh().step >= 40 and job.state == "running" and _has_checkpoint(job), job)
    head = LocalHead.find(folder)
    assert head is not None
    process = next(process for process in head.nodes[0].processes if process.name == part).find()
    assert process is not None
    attempt, since, killed_at = job.attempt, int(job.data["last_event_id"]), time.monotonic()
    process.kill()

    def seconds() -> float:
        return round(time.monotonic() - killed_at, 1)

    _await(lambda: job.refresh().state != "running", job)
    noticed_s = seconds()
    _await(lambda: (current_head := LocalHead.find(folder)) is not None and current_head.folder != head.folder, job)
    head_s = seconds()
    last_step = job.refresh().step
    _await(lambda: job.refresh().attempt > attempt, job)
    launched_s = seconds()
    _await(lambda: job.refresh().attempt > attempt and job.state == "running", job)
    running_s = seconds()
    events, parts = job.events(since), {}
    for event in events:
        if event.attempt == attempt:
            continue
        if event.data.get("record") == "phase":
            parts[event.data["name"]] = round(event.data["seconds"], 1)
        if event.kind == "metric":
            break
    next_step_s = seconds()
    events.close()
    return {
        "noticed_s": noticed_s, "head_runs_s": head_s, "launched_s": launched_s, "workers_run_s": running_s,
        "next_step_s": next_step_s, "steps_lost": last_step - int(event.data["step"]) + 1, "parts_s": parts,
        "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def _has_checkpoint(job: Job) -> bool:
    return bool(job.data.get("last_checkpoint"))


def _await(condition: Any, job: Job) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"did not come about: {job.data['state']}: {job.reason}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
