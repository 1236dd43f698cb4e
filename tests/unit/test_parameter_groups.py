"""Parameter groups: settings by pattern, vectors without weight decay, and jobs stored before there were groups."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from moe.parallel import Layout, ParameterShard, local_parameters
from moe.spec import AdamWSpec, JobSpec, MuonSpec
from moe.spec.optimizer import AdafactorSpec, OptimizerSpec
from moe.train.checkpoint.spec_changes import trajectory_changes
from moe.train.optimizer.build import build_optimizer, set_learning_rate
from service.control.jobs.earlier_releases import read_stored_spec
from tests.refusals import expect_problems
from tests.unit.test_spec import job

GROUPS: list[dict[str, Any]] = [
    {"pattern": "*.bias", "lr_factor": 2.0, "weight_decay": 0.25},
    {"pattern": "router.*", "lr_factor": 0.5},
    {"pattern": "r*", "lr_factor": 7.0},
]
EXPECTED = {
    "embedding": (1.0, 0.1), "router.weight": (0.5, 0.1), "router.bias": (2.0, 0.25), "rest": (7.0, 0.0),
    "experts": (1.0, 0.1), "expert_bias": (1.0, 0.0),
}  # fmt: skip
"""(factor of the learning rate, weight decay) by parameter."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.embedding, self.rest, self.router = parameter(5, 4), parameter(4), nn.Module()
        self.router.weight, self.router.bias = parameter(4, 2), parameter(2)
        self.experts, self.expert_bias = parameter(2, 4, 3), parameter(2, 3)
        for name, value in self.named_parameters():
            value.part = ParameterShard(value.shape, of_experts=name.startswith("expert"))  # type: ignore[attr-defined]


def updated(spec: OptimizerSpec, num_steps: int = 3) -> dict[str, torch.Tensor]:
    model = Model()
    parameters = local_parameters(model)
    optimizer = build_optimizer(spec, parameters, Layout.single())
    for step in range(num_steps):
        set_gradients(model, step)
        set_learning_rate(optimizer, 0.1)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def test_adamw_equals_torch_with_the_same_groups() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(
        [{"params": [value], "lr": 0.1 * EXPECTED[name][0], "weight_decay": EXPECTED[name][1]}
         for name, value in model.named_parameters()],
        betas=(0.9, 0.95), eps=1e-8, fused=True,
    )  # fmt: skip
    for step in range(3):
        set_gradients(model, step)
        optimizer.step()
    values = updated(AdamWSpec(name="adamw", beta2=0.95, eps=1e-8, weight_decay=0.1, groups=GROUPS))
    for name, expected in model.named_parameters():
        assert torch.equal(values[name], expected), name


def test_adafactor_scales_and_decays_by_group() -> None:
    """One step from the same weights and gradients, against the update without groups and decay."""
    before = {name: value.detach() for name, value in Model().named_parameters()}
    plain = updated(AdafactorSpec(name="adafactor"), num_steps=1)
    grouped = updated(AdafactorSpec(name="adafactor", weight_decay=0.1, groups=GROUPS), num_steps=1)
    for name, (factor, decay) in EXPECTED.items():
        expected = before[name] * (1 - 0.1 * factor * decay) + factor * (plain[name] - before[name])
        torch.testing.assert_close(grouped[name], expected)


@pytest.mark.parametrize("spec", [
    AdamWSpec(name="adamw"), AdamWSpec(name="adamw", moments="bfloat16"), AdamWSpec(name="adamw", moments="8bit"),
    AdafactorSpec(name="adafactor"), MuonSpec(name="muon"),
], ids=lambda spec: f"{spec.name} {getattr(spec, 'moments', '')}")  # fmt: skip
def test_an_optimizer_of_no_parameters_changes_nothing(spec: OptimizerSpec) -> None:
    """As on a rank whose layers are frozen."""
    model = Model().requires_grad_(False)
    optimizer = build_optimizer(spec, local_parameters(model), Layout.single())
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    for (name, value), expected in zip(model.named_parameters(), Model().parameters(), strict=True):
        assert torch.equal(value, expected), name


def test_muon_without_matrices_is_adamw() -> None:
    values = updated(MuonSpec(name="muon"))
    for name, expected in updated(AdamWSpec(name="adamw", beta2=MuonSpec(name="muon").beta2, eps=1e-9)).items():
        torch.testing.assert_close(values[name], expected)


def test_patterns_must_match_trained_parameters_that_no_earlier_group_does() -> None:
    optimizer = {"name": "adamw", "groups": [{"pattern": "*.norm*"}, {"pattern": "decoder.*.norm.weight"},
                                             {"pattern": "*.moe.router"}, {"pattern": "layers.*"}]}  # fmt: skip
    place = "train.optimizer.groups[{}].pattern"
    with expect_problems([
        ("duplicate", place.format(1), "decoder.*.norm.weight"), ("not_found", place.format(2), "*.moe.router"),
        ("not_found", place.format(3), "layers.*"),
    ]):  # fmt: skip
        JobSpec.parse(job(train={"optimizer": optimizer, "freeze": ["*.router"]}))


def test_jobs_stored_by_earlier_releases_decay_vectors_and_new_ones_do_not() -> None:
    fields = job(train={"optimizer": {"name": "adamw", "weight_decay": 0.1}})
    new = JobSpec.parse(fields)
    assert not new.train.optimizer.decay_vectors
    stored = new.model_dump(mode="json")
    assert read_stored_spec(json.dumps(stored)) == JobSpec.parse(stored, accepted=True) == new
    del stored["train"]["optimizer"]["decay_vectors"], stored["train"]["optimizer"]["groups"]
    former = read_stored_spec(json.dumps(stored))
    assert former == JobSpec.parse(stored, accepted=True)
    assert former.train.optimizer.update_settings("norm.weight", is_vector=True).weight_decay == 0.1
    assert read_stored_spec(former.model_dump_json()) == former
    (problem,) = trajectory_changes(former, new)
    assert (problem.path, problem.value) == ("train.optimizer.decay_vectors", False)


@pytest.mark.parametrize("accepted", [False, True])
def test_without_weight_decay_the_jobs_of_both_releases_are_the_same(accepted: bool) -> None:
    stored = JobSpec.parse(job()).model_dump(mode="json")
    del stored["train"]["optimizer"]["decay_vectors"]
    assert JobSpec.parse(stored, accepted=accepted).resolved == JobSpec.parse(job()).resolved
