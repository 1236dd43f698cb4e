"""A user's own module, with unusual features and explicit placements, trains the same under every layout."""

import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moe.layers import MoELayer, TokenContext
from moe.parallel import Layout, apply, clip_factor, discard_gradients, global_norm, local_parameters, reduce_gradients
from moe.plan.placement import Placement
from moe.routing import BatchCounts
from moe.spec import AdafactorSpec, AdamWSpec, MoESpec, OptimizerSpec
from moe.train.optimizer.build import build_optimizer, update_parameters
from tests.parity.full_tensors import FullTensors
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees

WORDS, GROUPS, TOKENS, STEPS = 11, 4, 6, 3
SPEC = MoESpec(num_experts=4, model_dim=8, hidden_dim=12, group_tokens=TOKENS, capacity_factor=1.0)
OPTIMIZERS = (
    AdamWSpec(name="adamw", peak_lr=0.01, weight_decay=0.1),
    AdafactorSpec(name="adafactor", peak_lr=0.01, weight_decay=0.1),
)


class Block(nn.Module):
    def __init__(self, moe: MoELayer, mixer: nn.Module) -> None:
        super().__init__()
        self.moe, self.mixer, self.drop = moe, mixer, nn.Dropout(0.2)

    def forward(self, x: Tensor, *, tokens: TokenContext) -> Tensor:
        x = x + self.drop(self.mixer(x)).tanh()
        return x + self.moe(x, tokens)[0]


class Guesser(nn.Module):
    """Predicts the next word: a table that is also the head, a mixer used twice, a frozen layer, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.head.weight = self.embedding.weight
        mixer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(1.5))
        moe = MoELayer(SPEC)  # copied, so that both begin with the same experts
        self.blocks = nn.ModuleList(Block(deepcopy(moe), mixer) for _ in range(2))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, words: Tensor, tokens: TokenContext) -> Tensor:
        x = self.frozen(self.embedding(words)) * self.scale
        for block in self.blocks:
            x = block(x, tokens=tokens)
        return self.head(x)


EXPERTS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "w_in": (("expert", 0), ("expert_tensor", 2), ("expert_fsdp", 0)),
    "w_out": (("expert", 0), ("expert_tensor", 1), ("expert_fsdp", 0)),
}
LAYOUTS = (
    Degrees(expert=2), Degrees(expert=4), Degrees(data=2, expert_fsdp=2), Degrees(data=2, fsdp=2, recompute="full"),
    Degrees(expert=2, fsdp=2, recompute="full"), Degrees(data=4, fsdp=2, expert_fsdp=2),
    Degrees(expert=2, data=2, fsdp=4, expert_fsdp=2), Degrees(expert=2, tensor=2), Degrees(data=2, tensor=2),
    Degrees(expert=2, data=2, tensor=2, expert_fsdp=2), Degrees(expert=2, expert_tensor=2, tensor=2, fsdp=2),
)  # fmt: skip


def place(model: nn.Module, layout: Layout, blocks: Mapping[str, str]) -> None:
    """Place experts over their axes, and everything else except scalars and the mixer over FSDP."""
    placements = []
    for name, parameter in model.named_parameters():
        default_splits = (("fsdp", 0),) if parameter.dim() and ".mixer." not in name else ()
        splits = EXPERTS.get(name.rpartition(".")[2], default_splits)
        placements.append(Placement(parameter=name, shape=parameter.shape, splits=splits))
    apply(model, placements, layout, blocks)


def train(degrees: Degrees, spec: OptimizerSpec, dropout: bool) -> tuple[list[float], dict[str, Tensor]]:
    """(norm of all gradients in each step, every parameter after the last)"""
    layout = Layout.build(degrees.plan(GROUPS))
    torch.manual_seed(4)
    model = Guesser().double().train(dropout)
    place(model, layout, {"blocks.0": "layer 0", "blocks.1": "layer 1"})
    parameters = local_parameters(model)
    optimizer, norms = build_optimizer(spec, parameters, layout), []
    local_groups = layout.local_groups(GROUPS)
    words = torch.randint(WORDS, (GROUPS, TOKENS + 1))[local_groups.start : local_groups.stop]
    ids = torch.arange(GROUPS * TOKENS).view(GROUPS, -1)[local_groups.start : local_groups.stop]
    counts = BatchCounts(GROUPS, GROUPS, GROUPS * TOKENS)
    for step in range(STEPS):
        torch.manual_seed(step)
        discard_gradients(parameters)
        logits = model(words[:, :-1], TokenContext(ids, step=step, seed=3, batch=counts))
        loss = functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten(), reduction="sum")
        (loss / (GROUPS * TOKENS)).backward()
        reduce_gradients(parameters, layout)
        norm = global_norm(parameters, layout)
        norms.append(float(norm))
        update_parameters(optimizer, parameters, spec.peak_lr, clip_factor(norm, 1.0))
    full_parameters = FullTensors(parameters, layout).gather([parameter.local.detach() for parameter in parameters])
    layout.close()
    return norms, full_parameters


def assert_same_training(answers: list[tuple[list[float], dict[str, Tensor]]], expected: tuple) -> None:
    norms, parameters = expected
    for actual_norms, actual_parameters in answers:
        assert actual_norms == pytest.approx(norms, rel=1e-10)
        for name, values in parameters.items():
            torch.testing.assert_close(actual_parameters[name], values, rtol=1e-10, atol=1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_a_users_module_trains_the_same(ranks: Pools, degrees: Degrees, spec: OptimizerSpec) -> None:
    expected = train(Degrees(), spec, False)
    frozen_values = {name: values for name, values in expected[1].items() if name.startswith("frozen")}
    assert len(frozen_values) == 2
    assert "head.weight" not in expected[1]
    torch.manual_seed(4)
    begin = Guesser().double().state_dict()
    assert all(torch.equal(values, begin[name]) for name, values in frozen_values.items())
    assert_same_training(ranks[degrees.workers].run(train, degrees, spec, False), expected)


def test_recomputed_blocks_draw_the_same_numbers(ranks: Pools) -> None:
    degrees, spec = Degrees(data=2, fsdp=2, recompute="full"), OPTIMIZERS[0]
    reference_answers = ranks[2].run(train, replace(degrees, recompute="none"), spec, True)
    recompute_answers = ranks[2].run(train, degrees, spec, True)
    for expected, actual in zip(reference_answers, recompute_answers, strict=True):
        assert_same_training([actual], expected)


class Residual(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        spec = MoESpec(
            num_experts=4, model_dim=8, hidden_dim=12, group_tokens=TOKENS, router="softmax_topk", top_k=2
        )  # fmt: skip
        self.moe, self.in_place = MoELayer(spec), in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.moe(x)[0]
        return y.mul_(2.0).add_(x) if self.in_place else y * 2.0 + x


def gradients(degrees: Degrees, in_place: bool) -> dict[str, Tensor]:
    layout = Layout.build(degrees.plan(GROUPS))
    torch.manual_seed(4)
    model = Residual(in_place).double()
    place(model, layout, {"moe": "layer 0"})
    local_groups = layout.local_groups(GROUPS)
    x = torch.randn(GROUPS, TOKENS, 8, dtype=torch.float64)[local_groups.start : local_groups.stop]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).square().sum().backward()
    parameters = local_parameters(model)
    reduce_gradients(parameters, layout)
    full_gradients = FullTensors(parameters, layout).gradients()
    layout.close()
    return full_gradients


@pytest.mark.parametrize(
    "degrees", [Degrees(data=2, fsdp=2, expert_fsdp=2), Degrees(data=2, tensor=2), Degrees(expert=2, fsdp=2)], ids=str
)
def test_what_a_layer_returns_may_be_changed_in_place_under_any_layout(ranks: Pools, degrees: Degrees) -> None:
    in_place_gradients, reference_gradients = (
        ranks[2].run(gradients, degrees, in_place)[0] for in_place in (True, False)
    )
    assert in_place_gradients.keys() == reference_gradients.keys()
    for name, expected in reference_gradients.items():
        torch.testing.assert_close(in_place_gradients[name], expected, rtol=1e-12, atol=0.0)
