"""The example's recommender on two nodes, one of which is lost: it is planned again, and its losses equal those of one
undisturbed process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe.parallel import Layout
from moe.plan import Cluster
from moe.spec import JobSpec
from moe.tasks.build import build_task
from moe.tasks.module.planning import plan_module_job
from moe.train.control import NoControl
from moe.train.loop import train
from moe.train.recorder import MemoryRecorder
from service.client import Job
from service.head.local_head import LocalHead
from tests.processes import DEADLINE_S
from tests.ray.control_plane import ControlPlane, await_checkpoint, kill_node, losses
from tests.ray.gated_recommender import GATE, close_gate

ROOT = Path(__file__).parents[2]
EXAMPLE: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "recommender" / "job.yaml").read_text())
BUILD, BATCH, GATED = "recommender.model:build", "recommender.data:batch", "tests.ray.gated_recommender:batch"
NUM_STEPS = 50


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHead]:
    """A head and a node with a declared GPU each, where the module can be imported."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'examples'}")  # for the nodes' processes, as set by an operator
    monkeypatch.setenv(GATE, f"{tmp_path / 'gate'}")
    head = LocalHead.start(tmp_path / "head", num_cpus=4, num_gpus=1)
    yield head.add_node(num_cpus=2, num_gpus=1)
    head.stop()


def job(batches: str = BATCH, **changes: Any) -> dict[str, Any]:
    """The example's job with a few steps in double precision and more of its tables split."""
    hints = {**EXAMPLE["model"]["hints"], "items.weight": {"split": 0}, "towers_TM": {"split": 1}}
    return {
        **EXAMPLE,
        "model": {**EXAMPLE["model"], "options": {"dtype": "float64"}, "hints": hints},
        "data": {**EXAMPLE["data"], "batches": batches},
        "train": {**EXAMPLE["train"], "num_steps": NUM_STEPS},
        **changes,
    }


@pytest.mark.slow
def test_it_goes_on_on_another_number_of_workers(nodes: LocalHead, cache: Path, tmp_path: Path) -> None:
    plane = ControlPlane(nodes, cache, tmp_path, allowed_code=f'["{BUILD}", "{GATED}"]').start()
    resources = {"min_workers": 1, "max_workers": 2, "gpus_per_worker": 1, "device": "cpu"}
    with close_gate(tmp_path / "gate"):
        recommender_job = plane.client.submit(job(GATED, resources=resources, checkpoint={"every_steps": 5}))
        await_checkpoint(recommender_job, 5)
        assert _layout(recommender_job) == (2, "S(0)")
        kill_node(nodes, 1)
    result = recommender_job.wait(DEADLINE_S)
    assert (result.state, result.step) == ("succeeded", NUM_STEPS), f"{result.data}\n{plane.output()[-3000:]}"
    assert recommender_job.plan().num_workers == 1
    plans = [event.data for event in recommender_job.events() if event.kind == "plan"]
    assert [data["plan"]["layout"] for data in plans] == [{"devices": 2}, {"devices": 1}]
    assert losses(recommender_job) == pytest.approx(reference_losses(tmp_path / "undisturbed"), rel=1e-10)
    plane.close()


def reference_losses(folder: Path) -> dict[int, float]:
    """Losses by step of one process without a cluster."""
    spec, recorder = JobSpec.parse(job()), MemoryRecorder()
    plan, task = plan_module_job(spec, Cluster(num_nodes=1, devices_per_node=1)), build_task(spec, (BUILD, BATCH))
    train(task, plan, Layout.build(plan), data=task.prepare(folder), storage=f"{folder}", cache=folder, attempt=1,
          group=0, recorder=recorder, control=NoControl())  # fmt: skip
    return {record.step: record.loss for record in recorder.metrics}


def _layout(job: Job) -> tuple[int, str]:
    plan = job.plan()
    return plan.num_workers, plan.module.plan["parameters"]["users.weight"]
