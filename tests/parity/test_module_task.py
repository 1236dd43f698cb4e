"""A user's own module under the trainer: the same losses on any number of ranks, saved on two, resumed on others."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

from moe.export.trained_model import TrainedModel
from moe.parallel import Layout
from moe.plan import Cluster, Plan
from moe.records import ModuleReport
from moe.spec import JobSpec
from moe.tasks.build import build_task
from moe.tasks.module.planning import plan_module_job
from moe.train.checkpoint.checkpointer import CheckpointError
from moe.train.loop import train
from moe.train.optimizer.schedule import learning_rate
from moe.train.recorder import MemoryRecorder
from tests.parity.gloo_ranks import Pools
from tests.refusals import expect_problem, expect_problems
from tests.service.users_module import batch, build
from tests.unit.train_runs import RequestAfter

CODE, STEPS = "tests.service.users_module", 6
ALLOWED = (f"{CODE}:build", f"{CODE}:batch", f"{CODE}:batch_by_name")
HINTS: dict[str, Any] = {
    "items.weight": {"split": 0},  # eleven rows: parts are uneven
    "inner.weight": {"split": 0},  # seven
    "norm.running_*": {"split": 0},
    "norm.weight": {"split": 0},
    "out.weight": {"split": 1},
}


def job(optimizer: str = "adamw", hints: dict[str, Any] = HINTS, **options: Any) -> JobSpec:
    return JobSpec.parse({
        "model": {"kind": "module", "build": ALLOWED[0], "hints": hints, "options": options},
        "data": {"corpus": "module", "batches": ALLOWED[1]},
        "train": {"num_steps": STEPS, "seed": 3, "clip_norm": 0.05, "optimizer": {"name": optimizer, "peak_lr": 0.02},
                  "schedule": {"warmup_steps": 0}},
        "checkpoint": {"every_steps": 2, "keep": 9},
    })  # fmt: skip


def make_plan(num_ranks: int, spec: JobSpec) -> Plan:
    return plan_module_job(spec, Cluster(num_nodes=1, devices_per_node=num_ranks))


def run(plan: Plan, storage: str, group: int = 0, steps: int = STEPS + 1, spec: JobSpec | None = None) -> Any:
    """(kind of outcome, losses, gradient norms, report) of a run that is asked to pause after some steps"""
    torch.manual_seed(torch.initial_seed() + group)  # must have no effect
    spec = spec or job()
    layout, task, recorder = Layout.build(plan), build_task(spec, ALLOWED), MemoryRecorder()
    outcome = train(task, plan, layout, data=task.prepare(storage), storage=storage, cache=Path(storage), attempt=1,
                    group=group, recorder=recorder, control=RequestAfter("pause", steps))  # fmt: skip
    layout.close()
    metrics = recorder.metrics
    return outcome.kind, [metric.loss for metric in metrics], [metric.grad_norm for metric in metrics], outcome.report


@pytest.mark.slow
def test_without_its_own_draws_it_is_trained_as_by_a_plain_loop(tmp_path: Path) -> None:
    spec = job(dropout=0.0)
    _, losses, norms, report = run(make_plan(1, spec), f"{tmp_path}", spec=spec)
    torch.manual_seed(spec.train.seed)
    module = build(dropout=0.0)
    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0)
    expected = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = learning_rate(spec.train, step)
        optimizer.zero_grad()
        loss = module(*batch(spec.train.seed, step))
        loss.backward()
        expected.append((float(loss.detach()), float(nn.utils.clip_grad_norm_(module.parameters(), 0.05))))
        optimizer.step()
    assert list(zip(losses, norms, strict=True)) == [pytest.approx(pair, rel=1e-10) for pair in expected]
    with torch.no_grad():
        assert report.loss == pytest.approx(float(module(*batch(spec.train.seed, STEPS))), rel=1e-10)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [3, 2, 4])
def test_a_module_is_trained_alike_on_any_number_of_ranks(ranks: Pools, tmp_path: Path, number: int) -> None:
    kind, losses, norms, report = run(make_plan(1, job()), f"{tmp_path}/one")
    assert (kind, len(losses), type(report)) == ("succeeded", STEPS, ModuleReport)
    assert max(norms) > 0.05  # so that they are clipped
    plan = make_plan(number, job())
    assert "S(0)" in plan.module.plan["parameters"]["items.weight"]
    answers = ranks[number].run(run, plan, f"{tmp_path}/{number}")
    assert answers[0][0] == "succeeded"
    assert answers[0][1] == pytest.approx(losses, rel=1e-10)
    assert answers[0][2] == pytest.approx(norms, rel=1e-10)
    assert [answer[3].loss for answer in answers] == pytest.approx([report.loss] * number, rel=1e-10)


@pytest.mark.slow
def test_batches_that_are_mappings_are_arguments_by_name(ranks: Pools, tmp_path: Path) -> None:
    spec = JobSpec.parse(job().model_dump(mode="json") | {"data": {"corpus": "module", "batches": ALLOWED[2]}})
    kind, by_name, _, report = run(make_plan(1, spec), f"{tmp_path}/one", spec=spec)
    _, in_order, _, report_in_order = run(make_plan(1, job()), f"{tmp_path}/in-order")
    assert (kind, by_name, report.loss) == ("succeeded", in_order, report_in_order.loss)
    (_, on_two, _, _), _ = ranks[2].run(run, make_plan(2, spec), f"{tmp_path}/two", 0, STEPS + 1, spec)
    assert on_two == pytest.approx(in_order, rel=1e-10)


@pytest.mark.slow
def test_it_is_saved_on_two_ranks_and_goes_on_on_three_and_on_one(ranks: Pools, tmp_path: Path) -> None:
    plans = {number: make_plan(number, job()) for number in (1, 2, 3)}
    (_, all_losses, _, report), _ = ranks[2].run(run, plans[2], f"{tmp_path}/whole")
    storage = f"{tmp_path}/parts"
    (kind, first, _, _), _ = ranks[2].run(run, plans[2], storage, 0, 3)
    assert (kind, len(first)) == ("paused", 3)
    (kind, second, _, _), *_ = ranks[3].run(run, plans[3], storage, 1, 2)
    assert (kind, len(second)) == ("paused", 2)
    kind, last, _, last_report = run(plans[1], storage, 2)
    assert kind == "succeeded"
    assert first + second + last == pytest.approx(all_losses, rel=1e-10)
    assert last_report.loss == pytest.approx(report.loss, rel=1e-10)


@pytest.mark.slow
def test_adafactor_is_refused_by_name_where_parts_are_split(ranks: Pools, tmp_path: Path) -> None:
    with expect_problem("unsupported", "train.optimizer.name", "adafactor"):
        make_plan(2, job("adafactor"))
    replicated_spec = job("adafactor", {"*": {"replicate": True}})
    _, losses, _, _ = run(make_plan(1, replicated_spec), f"{tmp_path}/one", spec=replicated_spec)
    (kind, on_two, _, _), _ = ranks[2].run(
        run, make_plan(2, replicated_spec), f"{tmp_path}/two", 0, STEPS + 1, replicated_spec
    )
    assert (kind, on_two) == ("succeeded", pytest.approx(losses, rel=1e-10))


def test_torch_alone_loads_a_checkpoint_and_no_code_of_it_is_called(ranks: Pools, tmp_path: Path) -> None:
    spec = job(dropout=0.0)
    (_, _, _, report), _ = ranks[2].run(run, make_plan(2, spec), f"{tmp_path}", 0, STEPS + 1, spec)
    (folder,) = tmp_path.glob("checkpoints/step-00000006.a1.g0")
    module = build(dropout=0.0)
    tensors = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it loads in one process
        checkpoint.load(tensors, checkpoint_id=str(folder))
    assert float(module(*batch(spec.train.seed, STEPS)).detach()) == pytest.approx(report.loss, rel=1e-10)
    with pytest.raises(CheckpointError, match=r"of a user's module .* whose code is not run here"):
        TrainedModel.load(str(folder))


def test_code_that_is_not_allowed_is_not_called(tmp_path: Path) -> None:
    plan = make_plan(1, job())
    functions = {"model.build": ALLOWED[0], "data.batches": ALLOWED[1]}
    for allowlist in ((), ALLOWED[:1], (CODE,)):
        expected = [("not_allowed", path, code) for path, code in functions.items() if code not in allowlist]
        task = build_task(job(), allowlist)
        with expect_problems(expected):
            task.prepare(tmp_path)
        with expect_problems(expected):
            task.build_model(Layout.build(plan))
