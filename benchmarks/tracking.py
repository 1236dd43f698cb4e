"""Cost of experiment trackers: processor time a step in the control plane, and in the tracker process and the processes
that its libraries start.

The records are those of `benchmarks.recording`, read from the store in pages of as many steps of 50 ms as pass between
two looks. Nothing of this is in the way of a step; on a machine that also trains, it competes for the processor at a
lower priority. The limit is 0.5% of a 50 ms step.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks import results
from benchmarks.recording import STEP_S, record_of
from moe.spec import JobSpec
from moe.spec.track import TRACKER_NAMES, TrackerName
from service.control.report.hub import Hub
from service.control.report.ingest import Ingest
from service.control.report.tokens import TokenMint
from service.control.store.database import Database
from service.control.store.jobs import insert_job
from service.control.tracking import unsent
from service.settings import Settings
from service.tracker.messages import TrackedRun, TrackerOrder, TrackerReply
from service.tracker.process import TrackerProcess
from service.wire.events import Record

NUM_STEPS = 2000
PAGE_STEPS = round(Settings.model_fields["tracking_interval_s"].default / STEP_S)
LIMIT_SHARE = 0.005
FIELDS: dict[TrackerName, dict[str, Any]] = {
    "mlflow": {}, "wandb": {"mode": "offline"}, "tensorboard": {}, "trackio": {},
}  # fmt: skip


def filled_store(folder: Path) -> tuple[Database, int]:
    """A store with one running job of `NUM_STEPS` steps, and the job's number."""
    database = Database(f"sqlite:///{folder / 'shardyard.db'}")
    database.migrate()
    values = {
        "id": "job-benchmark", "owner": "me", "name": "x", "spec": "{}", "storage": "/nowhere", "state": "running",
        "reason": "", "num_steps": NUM_STEPS, "created_at": 0, "updated_at": 0, "queued_at": 0, "attempt": 1,
        "launch": "submitted",
    }  # fmt: skip
    with database.write() as tx:
        number = insert_job(tx, values, {}).number
    ingest = Ingest(database, Hub(), TokenMint(b"key"), on_phase=lambda: None)
    records = [
        Record(kind="metric", time=datetime.now(UTC), data=record_of(step).to_plain())
        for step in range(1, NUM_STEPS + 1)
    ]
    ingest.take_over("job-benchmark", 1, "group-0", 0, records)
    return database, number


@contextmanager
def served_mlflow(folder: Path) -> Iterator[str]:
    """URL of an MLflow server in this process, whose own time does not count."""
    from tests.tracker.mlflow_server import MLflowServer, serving

    token = "benchmark"
    os.environ["MLFLOW_TRACKING_TOKEN"] = token
    (folder / "server").mkdir()
    with serving(MLflowServer(folder / "server", token)) as server:
        yield server.url


def wait_for(process: TrackerProcess, kind: str) -> TrackerReply:
    while True:
        for reply in process.replies():
            assert reply.kind == kind, reply
            return reply
        assert process.runs, process.status
        time.sleep(0.001)


def family(process: TrackerProcess) -> Iterator[psutil.Process]:
    parent = psutil.Process(process.pid)
    yield parent
    yield from parent.children(recursive=True)


def cpu_s(process: TrackerProcess) -> float:
    return sum(sum(member.cpu_times()[:2]) for member in family(process))


def measure(
    tracker: TrackerName, spec: JobSpec, database: Database, number: int, folder: Path, server: str
) -> dict[str, float]:
    process = TrackerProcess()
    try:
        run = TrackedRun(
            job_id="job-benchmark", tracker=tracker, name="x", spec=spec.model_dump(mode="json"),
            fields=getattr(spec.track, tracker).model_dump(mode="json"), folder=str(folder),
            server=server,
        )  # fmt: skip
        process.tell(TrackerOrder(job_id=run.job_id, tracker=tracker, open=run))
        wait_for(process, "opened")
        cpu_began, place, sending_s = cpu_s(process), 0, 0.0
        while True:
            began = time.thread_time()
            with database.read() as tx:
                page = unsent.read_unsent(tx, number, spec, place, committed_only=False)
            if page is None:
                break
            process.tell(TrackerOrder(job_id=run.job_id, tracker=tracker, steps=page.steps, through=page.through))
            sending_s += time.thread_time() - began
            place = page.through
            wait_for(process, "written")
        writing_s = cpu_s(process) - cpu_began
        memory_bytes = sum(member.memory_info().rss for member in family(process))
    finally:
        process.end()
    return {
        "control_plane_ms_a_step": 1e3 * sending_s / NUM_STEPS,
        "tracker_process_ms_a_step": 1e3 * writing_s / NUM_STEPS,
        "share_of_50_ms_step": (sending_s + writing_s) / NUM_STEPS / STEP_S,
        "memory_mb": memory_bytes / 1e6,
    }


def main() -> None:
    assert PAGE_STEPS < unsent.PAGE_EVENTS
    unsent.PAGE_EVENTS = PAGE_STEPS
    spec = JobSpec.parse({
        "model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"},
        "train": {"num_steps": NUM_STEPS, "batch_tokens": 1024}, "track": FIELDS,
    })  # fmt: skip
    figures: dict[str, Any] = {"records": NUM_STEPS, "page_steps": PAGE_STEPS, "limit_share": LIMIT_SHARE}
    with tempfile.TemporaryDirectory() as folder:
        database, number = filled_store(Path(folder))
        print(f"{'tracker':14} {'control plane':>14} {'tracker process':>16} {'of a 50 ms step':>16} {'memory':>9}")
        for tracker in TRACKER_NAMES:
            server = f"sqlite:///{folder}/mlflow.db" if tracker == "mlflow" else ""
            figures[tracker] = measure(tracker, spec, database, number, Path(folder), server)
        with served_mlflow(Path(folder)) as url:
            figures["mlflow_server"] = measure("mlflow", spec, database, number, Path(folder), url)
        for tracker, row in figures.items():
            if not isinstance(row, dict):
                continue
            print(f"{tracker:14} {row['control_plane_ms_a_step']:11.3f} ms {row['tracker_process_ms_a_step']:13.3f} ms "
                  f"{row['share_of_50_ms_step']:16.2%} {row['memory_mb']:6.0f} MB")  # fmt: skip
        database.close()
    print(f"limit: {LIMIT_SHARE:.1%}; written to {results.write('tracking', figures)}")


if __name__ == "__main__":
    main()
