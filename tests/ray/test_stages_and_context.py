"""A language model in pipeline stages, and with its rows split over context ranks, as jobs of the service: a worker is
killed once, and the losses are those of one worker."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
    job = plane.client.submit(spec_of(data, 1, {}))
    assert job.wait(DEADLINE_S).state == "succeeded", job.data["reason"]
    return losses(job)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"pipeline": 2}, {"context": 2}], ids=str)
def test_a_killed_rank_of_a_pipeline_or_a_sequence_changes_no_loss(
    plane: ControlPlane, data: dict[str, Any], parallel: dict[str, Any], losses_of_one_worker: dict[int, float]
) -> None:
    job = plane.client.submit(spec_of(data, 2, parallel))
    workers = worker_group(job)
    await_checkpoint(job, 10)
    os.kill(workers[1]["pid"], signal.SIGKILL)
    job = job.wait(DEADLINE_S)
    assert job.state == "succeeded", job.data["reason"]
    assert [change["state"] for change in state_changes(list(job.events()))][-3:] == [
        "recovering", "running", "succeeded",
    ]  # fmt: skip
    assert losses(job) == pytest.approx(losses_of_one_worker, rel=1e-3)
    plan = job.plan()
    assert {axis: getattr(plan.degrees, axis) for axis in parallel} == parallel
    assert plan.not_yet == ()
    assert plan.measured is not None
    assert plan.measured.num_steps > 10
    assert plan.predicted.step_s > 0
