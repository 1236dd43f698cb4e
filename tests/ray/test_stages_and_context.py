"""Jobs of a language model in pipeline stages, and with rows split over context ranks: one worker is killed, and the
losses are those of an undisturbed run of the same layout. Their plans show predicted and measured times."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe.plan import Plan
from service.client import Job
from service.head.local_head import LocalHead
from tests.processes import DEADLINE_S
from tests.ray.control_plane import ControlPlane, await_checkpoint, losses, state_changes, worker_group
from tests.unit.language_runs import documents, language_job

NUM_STEPS = 60
"""So many that a run is not over before a worker of it has been killed."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return documents(tmp_path_factory.mktemp("data") / "documents")


@pytest.fixture(scope="module")
def plane(
    head: LocalHead, cache: Path, data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    folder = str(Path(data["sources"][0]["paths"][0]).parent)
    plane = ControlPlane(head, cache, tmp_path_factory.mktemp("plane"), data_roots=f'["{folder}"]').start()
    yield plane
    plane.close()


def spec_of(data: dict[str, Any], num_workers: int, parallel: dict[str, Any]) -> dict[str, Any]:
    job = language_job(
        data, num_steps=NUM_STEPS, workers=num_workers, parallel=parallel, train={"batch_tokens": 512},
        checkpoint={"every_steps": 10}, model={"num_layers": 4},
    )  # fmt: skip
    return job.model_dump(mode="json", exclude_unset=True)


@pytest.fixture(scope="module")
def losses_of_one_worker(plane: ControlPlane, data: dict[str, Any]) -> dict[int, float]:
    return losses(finished(plane.client.submit(spec_of(data, 1, {}))))


def finished(job: Job) -> Job:
    job = job.wait(DEADLINE_S)
    assert job.state == "succeeded", job.data["reason"]
    return job


def assert_measured_beside_predicted(plan: Plan, num_steps: int) -> None:
    """At least `num_steps` steps of the run are measured. Memory is predicted only: runs record that of GPUs alone, and
    `tests/parity` compares the prediction with what processes hold."""
    assert plan.not_yet == ()
    assert plan.predicted.step_s > 0
    assert 0 < plan.memory.total <= plan.memory.limit
    assert plan.measured is not None
    assert plan.measured.num_steps >= num_steps
    assert plan.measured.step_s > 0
    assert plan.measured.tokens_per_s == pytest.approx(512 / plan.measured.step_s)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"pipeline": 2}, {"context": 2}], ids=str)
def test_a_killed_rank_of_a_pipeline_or_a_sequence_changes_no_loss(
    plane: ControlPlane, data: dict[str, Any], parallel: dict[str, Any], losses_of_one_worker: dict[int, float]
) -> None:
    undisturbed = finished(plane.client.submit(spec_of(data, 2, parallel)))
    job = plane.client.submit(spec_of(data, 2, parallel))
    workers = worker_group(job)
    await_checkpoint(job, 10)
    os.kill(workers[1]["pid"], signal.SIGKILL)
    job = finished(job)
    assert [change["state"] for change in state_changes(list(job.events()))][-3:] == [
        "recovering", "running", "succeeded",
    ]  # fmt: skip
    expected = losses(undisturbed)
    assert sorted(expected) == [*range(1, NUM_STEPS + 1)]
    assert losses(job) == expected
    # One worker sums in another order, and a step of float32 may flip a choice between experts.
    assert expected == pytest.approx(losses_of_one_worker, rel=1e-3)
    plan, undisturbed_plan = job.plan(), undisturbed.plan()
    assert {axis: getattr(plan.degrees, axis) for axis in parallel} == parallel
    assert (plan.degrees, plan.memory) == (undisturbed_plan.degrees, undisturbed_plan.memory)
    assert_measured_beside_predicted(plan, 10)
    assert_measured_beside_predicted(undisturbed_plan, NUM_STEPS // 2)
