"""The moving average of the weights: values, evaluation, checkpoints, export."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from moe.export.hub import CheckpointSource
from moe.export.trained_model import TrainedModel
from moe.parallel import Layout, OptimizerShards, keep_buffers, local_parameters, narrow
from moe.plan import Cluster
from moe.plan.candidate import Candidate, Options
from moe.plan.cost.memory import MemoryModel
from moe.plan.degrees import Degrees
from moe.plan.profile import OURS
from moe.spec import JobSpec
from moe.storage.folder import Folder
from moe.train.checkpoint.checkpointer import CheckpointError
from moe.train.checkpoint.spec_changes import state_changes, trajectory_changes
from moe.train.weight_average import WeightAverage
from tests.refusals import expect_problem
from tests.unit.test_spec import job as fields_of_job
from tests.unit.train_runs import RequestAfter, corpus, course, job, run

DECAY = 0.8


def test_equals_torchs_averaged_model() -> None:
    model = nn.Linear(3, 2)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average = WeightAverage(DECAY, model, OptimizerShards(local_parameters(model), Layout.single()))
    for step in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
        reference.update_parameters(model)
        average.update(step)
    for tensor, expected in zip(average.tensors, reference.module.parameters(), strict=True):
        assert torch.equal(tensor, expected)


def test_weights_and_their_narrow_copies_are_exchanged_and_come_back() -> None:
    model = nn.Linear(3, 2)
    parameters = local_parameters(model)
    keep_buffers(parameters, Layout.single())
    average = WeightAverage(DECAY, model, OptimizerShards(parameters, Layout.single()))
    before = model.weight.detach().clone()
    average.tensors[0].fill_(2.0)
    assert torch.equal(narrow(model.weight, torch.bfloat16), before.bfloat16())
    with average.in_place_of_weights():
        assert (model.weight == 2).all()
        assert (narrow(model.weight, torch.bfloat16) == 2).all()
    assert torch.equal(model.weight, before)
    assert torch.equal(narrow(model.weight, torch.bfloat16), before.bfloat16())
    assert (average.tensors[0] == 2).all()


def checkpoint(storage: Path, step: int) -> str:
    (folder,) = (path for path in (storage / "checkpoints").glob(f"step-{step:08d}.*") if path.is_dir())
    return str(folder)


def job_with_average(data: dict[str, Any], **evaluation: Any) -> JobSpec:
    settings = {"max_pairs": 6, "max_pairs_along_the_way": 6, "num_examples": 0, "every_steps": 2, **evaluation}
    return job(data, train={"ema_decay": DECAY, "num_steps": 4, "evaluation": settings},
               checkpoint={"every_steps": 1, "keep": 9})  # fmt: skip


@pytest.mark.slow
def test_a_run_evaluates_saves_resumes_and_exports_its_average(tmp_path: Path) -> None:
    data, cache = corpus(tmp_path), tmp_path / "cache"
    spec = job_with_average(data, use_ema=True)
    outcome, recorder = run(spec, tmp_path / "whole", cache)
    expected: dict[str, torch.Tensor] = {}
    for step in range(1, 5):
        weights = TrainedModel.load(checkpoint(tmp_path / "whole", step)).model.state_dict()
        expected = {
            name: weight.double() if step == 1 else DECAY * expected[name] + (1 - DECAY) * weight
            for name, weight in weights.items()
        }
    exported = TrainedModel.load(checkpoint(tmp_path / "whole", 4), use_ema=True)
    source = CheckpointSource(Folder(checkpoint(tmp_path / "whole", 4)), use_ema=True)
    for name, weight in exported.model.state_dict().items():
        torch.testing.assert_close(weight, expected[name].float())
        assert torch.equal(source.read(name, tuple((0, size) for size in weight.shape)), weight)

    plain_outcome, plain_recorder = run(job_with_average(data), tmp_path / "plain", cache)
    plain = course(plain_recorder)
    for record, other in zip(course(recorder), plain, strict=True):
        assert record["loss"] == other["loss"]
        assert ("held_out" in record) == ("held_out" in other)
    assert course(recorder)[-1]["held_out"] != plain[-1]["held_out"]
    assert outcome.report.to_plain()["sets"] != plain_outcome.report.to_plain()["sets"]  # type: ignore[union-attr]

    run(spec, tmp_path / "parts", cache, control=RequestAfter("pause", 2))
    run(spec, tmp_path / "parts", cache, group=1)
    resumed = TrainedModel.load(checkpoint(tmp_path / "parts", 4), use_ema=True).model.state_dict()
    assert all(torch.equal(weight, resumed[name]) for name, weight in exported.model.state_dict().items())


def test_checkpoints_without_an_average_are_refused(tmp_path: Path) -> None:
    spec = job(corpus(tmp_path), train={"num_steps": 1})
    run(spec, tmp_path / "storage", tmp_path / "cache")
    with pytest.raises(CheckpointError):
        TrainedModel.load(checkpoint(tmp_path / "storage", 1), use_ema=True)
    averaged = job(corpus(tmp_path), train={"num_steps": 1, "ema_decay": DECAY})
    (problem,) = state_changes(spec, averaged)
    assert (problem.code, problem.path, problem.value) == ("conflict", "train.ema_decay", DECAY)
    assert not state_changes(averaged, spec)
    (problem,) = trajectory_changes(spec, averaged)
    assert problem.path == "train.ema_decay"


def test_evaluating_an_average_requires_one() -> None:
    with expect_problem("requires", "train.evaluation.use_ema", True):
        JobSpec.parse(fields_of_job(train={"evaluation": {"use_ema": True}}))


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_it_is_counted_as_another_copy_of_the_weights(device: str) -> None:
    specs = [JobSpec.parse(fields_of_job(train=train)) for train in ({}, {"ema_decay": DECAY})]
    cluster = Cluster(num_nodes=1, devices_per_node=1, device=device, memory_bytes=1 << 34)
    plain, averaged = (MemoryModel(spec, cluster, OURS).estimate(Candidate(Degrees(), Options())) for spec in specs)
    weights = 4 * specs[0].model.num_parameters()
    assert averaged.optimizer - plain.optimizer == weights
    assert averaged.staging - plain.staging == (weights if device == "cpu" else 0)
