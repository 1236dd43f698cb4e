"""Jobs written straight into a store, in every state, as many as a list may have: posting ten thousand would take
minutes."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import Connection

from service.control.scheduling.requests import new_job_id
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.jobs import insert_job, set_columns
from service.wire.states import State
from tests.service.control_plane import spec

NAMES = (
    "translate-100-to-english",
    "mixtral-upcycled",
    "switch-base-8",
    "expert-choice",
    "qwen3-moe-sft",
    "long-context",
)
TEAMS = ("research", "translation", "platform")
REASONS: Mapping[State, str] = {
    State.QUEUED: "needs 8 GPUs; 3 are free, and 2 jobs are before it",
    State.STARTING: "2 workers placed; waiting for them to start",
    State.RUNNING: "running on 2 workers",
    State.RECOVERING: "node 10.0.0.3 (worker-2) was lost; ranks 4-7 ran there",
    State.PAUSING: "asked to pause by local; commits a checkpoint first",
    State.PAUSED: "paused by local at step 1,200",
    State.SUCCEEDED: "finished 2,000 steps",
    State.FAILED: "rank 1: CUDA out of memory: 512 MiB were requested, 130 MiB are free",
    State.CANCELLED: "cancelled by local",
}


def store_jobs(
    database: Database, num_jobs: int, seed: int = 0, plan: str | None = None, root: Path = Path("/nowhere")
) -> list[str]:
    """Store jobs that have ended, whose files would be below `root`; returns their ids, oldest first."""
    draw = random.Random(seed)
    states = [state for state in REASONS if state in (State.SUCCEEDED, State.FAILED, State.CANCELLED)]
    ids = []
    with database.write() as tx:
        for number in range(num_jobs):
            job_id, state = new_job_id(), draw.choice(states)
            store_job(tx, job_id, state, draw, created_at=now_us() - (num_jobs - number) * 60_000_000, plan=plan,
                storage=f"{root}/{job_id}")  # fmt: skip
            ids.append(job_id)
    return ids


def store_job(
    tx: Connection, job_id: str, state: State, draw: random.Random, *, created_at: int, plan: str | None, storage: str
) -> None:
    name, labels, num_steps = draw.choice(NAMES), {"team": draw.choice(TEAMS)}, draw.choice((500, 2000, 20_000))
    step = num_steps if state == State.SUCCEEDED else draw.randrange(num_steps)
    loss = round(draw.uniform(1.2, 9.5), 4)
    job = insert_job(
        tx,
        {
            "id": job_id, "owner": draw.choice(("local", "ana", "mehmet")), "name": name, "num_steps": num_steps,
            "spec": json.dumps(spec(name=name)), "storage": storage, "state": state,
            "reason": REASONS[state], "created_at": created_at, "updated_at": created_at, "queued_at": created_at,
        },
        labels,
    )  # fmt: skip
    set_columns(tx, job.number, {
        "step": step, "loss": loss, "last_metric": json.dumps({"step": step, "loss": loss}), "plan": plan,
        "finished_at": created_at + 1_000_000, "attempt": 1,
    })  # fmt: skip
