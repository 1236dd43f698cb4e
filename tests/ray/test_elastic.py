"""A job of one to two workers on two nodes: it continues without one of them, and grows when another joins."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe.plan import Plan
from service.head.local_head import LocalHead
from service.wire.events import Event
from tests.processes import DEADLINE_S, await_that
from tests.ray.control_plane import ControlPlane, await_checkpoint, job_spec, kill_node, state_changes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[LocalHead]:
    """A head and two nodes with a declared GPU each, which is what placement considers."""
    head = LocalHead.start(tmp_path / "head", num_cpus=4)
    yield head.add_node(num_cpus=2, num_gpus=1).add_node(num_cpus=2, num_gpus=1)
    head.stop()


@pytest.mark.slow
def test_a_lost_node_and_another_one(nodes: LocalHead, cache: Path, tmp_path: Path) -> None:
    plane = ControlPlane(nodes, cache, tmp_path, grow_after_s=5).start()
    job = plane.client.submit(
        job_spec(
            train={"num_steps": 600, "batch_tokens": 1024, "evaluation": {"max_pairs": 4}},
            parallel="auto",
            resources={"min_workers": 1, "max_workers": 2, "gpus_per_worker": 1, "device": "cpu"},
            checkpoint={"every_steps": 20, "keep": 2},
        )
    )
    await_checkpoint(job, 20)
    assert job.plan().num_workers == 2
    assert job.plan().measured is not None
    assert not _counts_with_measured_loads(job.plan())
    kill_node(nodes, 2)

    def has(workers: int) -> bool:
        # The plan first: between two requests, a job may get its next plan.
        return job.plan().num_workers == workers and job.refresh().state == "running"

    await_that(lambda: has(1), lambda: f"{job.refresh().data}\n{plane.output()[-3000:]}")
    assert _counts_with_measured_loads(job.plan())
    last_step = job.refresh().step
    await_that(lambda: job.refresh().step > last_step + 5, lambda: f"{job.refresh().data}")
    nodes.add_node(num_cpus=2, num_gpus=1)
    await_that(lambda: has(2), lambda: f"{job.refresh().data}\n{plane.output()[-3000:]}")
    job.cancel()
    assert job.wait(DEADLINE_S).state == "cancelled"

    events = list(job.events())
    plans = [event.data for event in events if event.kind == "plan"]
    assert [data["plan"]["num_workers"] for data in plans] == [2, 1, 2]
    assert [data["before"] and data["before"]["num_workers"] for data in plans] == [None, 2, 1]
    starts = [event for event in events if event.data.get("record") == "started"]
    sizes = [len(event.data["workers"]) for event in starts]
    assert sizes[0] == 2
    assert 1 in sizes
    assert sizes[-1] == 2
    resume_steps = [event.data["step"] for event in events if event.data.get("record") == "resumed"]
    assert all(step >= 20 for step in resume_steps[1:])
    assert job.refresh().data["failures"] <= 1  # the death of the group; making room does not count
    assert "recovering" in [data["state"] for data in state_changes(events)]
    _no_step_is_missing(events)
    plane.close()


def _counts_with_measured_loads(plan: Plan) -> bool:
    return any("times the mean load, as measured in the newest steps" in reason for reason in plan.reasons)


def _no_step_is_missing(events: list[Event]) -> None:
    steps = {event.data["step"] for event in events if event.kind == "metric"}
    assert steps == set(range(1, max(steps) + 1))
