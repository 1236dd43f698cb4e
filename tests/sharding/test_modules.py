"""Modules other than Transformers, with few or no hints, equal one device over several steps: losses, gradients,
parameters and batch norm statistics."""

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from tests.parity.gloo_ranks import Pools
from tests.sharding.modules import (
    ConvolutionalNetwork,
    Recommender,
    RecurrentLanguageModel,
    StateSpaceModel,
    UnevenPerceptron,
)
from tests.sharding.on_ranks import Built, check_on_ranks, cores

D = torch.float64
Hints = dict[str, sharding.Split | sharding.Replicate | sharding.Shard]


@dataclass(frozen=True)
class Case:
    """A module with its batch, planned with some hints."""

    module: type[nn.Module]
    arguments: tuple[object, ...] = ()
    hints: Hints = field(default_factory=dict)
    expected_placements: dict[str, str] = field(default_factory=dict)
    """Expected placements along each axis by parameter."""
    always: tuple[int, ...] = (2, 4)
    """Ranks of one axis outside the grid; each kind of module has 2 and 4."""
    on_two_axes: bool = False


TABLES = ("users.weight", "items.weight")
CASES = {
    "images": Case(ConvolutionalNetwork, always=(2,), on_two_axes=True),
    "images by batch": Case(ConvolutionalNetwork, hints={"inputs": sharding.Split(0)}, always=(4,)),
    "one image": Case(ConvolutionalNetwork, hints={"inputs.0": sharding.Split(2)}, always=(4,)),
    "recommender": Case(Recommender, (23, 16, 9), always=(2,)),
    "recommender by rows": Case(
        Recommender, (23, 16, 9), dict.fromkeys(TABLES, sharding.Split(0)), dict.fromkeys(TABLES, "S(0)"), always=(4,)
    ),
    "recommender by experts": Case(
        Recommender, (23, 16, 9),
        {"experts.*.0.*": sharding.Split(0), "gates.*.weight": sharding.Split(0), "tags.*": sharding.Replicate()},
        {"experts.2.0.weight": "S(0)", "gates.watch.weight": "S(0)", "tags.weight": "R"}, always=(2,), on_two_axes=True,
    ),
    "uneven": Case(UnevenPerceptron, always=(4,), on_two_axes=True),
    "uneven by rows": Case(
        UnevenPerceptron, (), {"layers.*.weight": sharding.Split(0)}, {"layers.1.weight": "S(0)"}, always=(2,)
    ),
    "LSTM": Case(RecurrentLanguageModel, ("LSTM",), always=(2,)),
    "GRU by batch": Case(
        RecurrentLanguageModel, ("GRU",), {"inputs": sharding.Split(0)}, always=(4,), on_two_axes=True
    ),
    "state space": Case(StateSpaceModel, always=(2,)),
    "state space by time": Case(StateSpaceModel, (), {"inputs.0": sharding.Split(1)}, always=(4,), on_two_axes=True),
}  # fmt: skip


def batch(name: str) -> tuple[Tensor, ...]:
    def number(limit: int, *shape: int) -> Tensor:
        return torch.randint(0, limit, shape)

    module = CASES[name].module
    if name == "one image":
        return torch.randn(1, 3, 61, 44, dtype=D), number(5, 1)
    if module is ConvolutionalNetwork:
        return torch.randn(6, 3, 30, 22, dtype=D), number(5, 6)
    if module is Recommender:
        clicks, watched_s = number(2, 10).to(D), torch.rand(10, dtype=D) * 100
        return number(23, 10), number(16, 10), number(9, 10, 4), clicks, watched_s
    if module is UnevenPerceptron:
        return torch.randn(9, 7, dtype=D), torch.randn(9, dtype=D)
    if module is RecurrentLanguageModel:
        return (number(19, 5, 4),)
    return (torch.randn(5, 7, 2, dtype=D),)


def build(name: str) -> Built:
    torch.manual_seed(4)
    case = CASES[name]
    return case.module(*case.arguments).double(), batch(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=marks)
        for name, case in CASES.items()
        for mesh, marks in (
            *(({"a": size}, () if size in case.always else pytest.mark.grid) for size in (2, 4)),
            *([({"a": 2, "b": 2}, pytest.mark.grid)] if case.on_two_axes else []),
        )
    ],
    ids=str,
)
def test_losses_gradients_and_buffers_are_those_of_one_device(ranks: Pools, name: str, mesh: dict[str, int]) -> None:
    plan = check_on_ranks(ranks, partial(build, name), mesh, CASES[name].hints, steps=3)
    for parameter, placement in CASES[name].expected_placements.items():
        assert plan.parameters[parameter] == " ".join([placement] * len(mesh))
    if name == "one image":
        windows = [options for node, options in plan.options.items() if node.startswith("convolution")]
        assert {option for options in windows for option in options} == {"exchange halo d2"}


def compare_modes() -> list[bool]:
    """Whether a network equals one device when it switches between training and evaluation."""
    module, sample = build("images")
    applied = sharding.apply(module, sharding.plan(module, sample, cores(2), mesh={"a": 2}))
    equal = []
    for training in (True, True, False, True, False):
        applied.train(training)
        module.train(training)
        equal.append(torch.allclose(applied(*sample), module(*sample), rtol=1e-10))
    sharding.close(applied)
    return equal


@pytest.mark.slow
def test_batch_norm_has_statistics_of_the_global_batch(ranks: Pools) -> None:
    assert ranks[2].run(compare_modes) == [[True] * 5] * 2
