"""A user's own module on two nodes, one of which is lost: it is planned anew, and its losses are as they were."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.client import Job
from service.head.local_head import LocalHead
from tests.processes import DEADLINE_S, await_that
from tests.ray.control_plane import ControlPlane, await_checkpoint, kill_node, losses

CODE = "tests.service.users_module"


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHead]:
    """A head and two nodes with a GPU each (in the books, by which placement goes), where the module is found."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    head = LocalHead.start(tmp_path / "head", num_cpus=4)
    yield head.add_node(num_cpus=2, num_gpus=1).add_node(num_cpus=2, num_gpus=1)
    head.stop()


def job(batches: str, resources: dict[str, Any]) -> dict[str, Any]:
    hints = {"items.weight": {"split": 0}, "norm.running_*": {"split": 0}, "out.weight": {"split": 1}}
    return {
        "model": {"kind": "module", "build": f"{CODE}:build", "hints": hints},
        "data": {"corpus": "module", "batches": f"{CODE}:{batches}"},
        "train": {"num_steps": 150, "optimizer": {"name": "adamw", "peak_lr": 0.01}},
        "checkpoint": {"every_steps": 10},
        "resources": {"gpus_per_worker": 1, "device": "cpu", **resources},
    }


def test_it_goes_on_on_another_number_of_workers(nodes: LocalHead, cache: Path, tmp_path: Path) -> None:
    allowed = ", ".join(f'"{CODE}:{name}"' for name in ("build", "batch", "slow_batch"))
    plane = ControlPlane(nodes, cache, tmp_path, allowed_code=f"[{allowed}]").start()
    disturbed = plane.client.submit(job("slow_batch", {"min_workers": 1, "max_workers": 2}))
    await_checkpoint(disturbed, 10)
    assert _layout(disturbed) == (2, "S(0)")
    kill_node(nodes, 2)
    ended = disturbed.wait(DEADLINE_S)
    assert (ended.state, ended.step) == ("succeeded", 150), f"{ended.data}\n{plane.output()[-3000:]}"
    assert disturbed.plan().num_workers == 1
    told = [event.data for event in disturbed.events() if event.kind == "plan"]
    assert [data["plan"]["layout"] for data in told] == [{"devices": 2}, {"devices": 1}]

    through = plane.client.submit(job("batch", {"num_workers": 1}))
    await_that(lambda: through.refresh().ended)
    assert through.state == "succeeded", through.data
    assert losses(disturbed) == pytest.approx(losses(through), rel=1e-10)
    plane.close()


def _layout(job: Job) -> tuple[int, str]:
    plan = job.plan()
    assert plan.module is not None
    return plan.num_workers, plan.module.plan["parameters"]["items.weight"]
