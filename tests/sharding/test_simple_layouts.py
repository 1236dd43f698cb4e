"""Without hints no plan is predicted slower than DDP or FSDP by more than the error of predictions, and where either is
as good as what the search finds, it is the plan."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from moe.plan import Cluster
from moe.plan.search.spread import WITHIN_ERROR
from moe.sharding.solve.strategies import BY_SIMPLICITY
from moe.spec import SpecError
from tests.sharding.on_ranks import cores
from tests.sharding.random_modules import STEPS, Recipe

WITHIN_GAP = 1.01
"""Factor between the best of a large integer program and what is found of it."""


def summed(outputs: tuple[Tensor, ...]) -> Tensor:
    return sum((each.square().sum() for each in outputs), torch.zeros(()))


def random_cluster(draw: random.Random) -> Cluster:
    links = [{"devices": 2, "bytes_per_s": 10 ** draw.uniform(5, 12), "latency_s": draw.choice([0.0, 1e-7, 1e-5])}]
    return Cluster.model_validate(cores(2).model_dump(exclude_none=True) | {"links": links})


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_slower_than_either_by_hints(seed: int):
    draw = random.Random(seed)
    shape = (draw.choice([2, 4, 6]), *draw.choices(range(1, 7), k=draw.randrange(1, 3)))
    steps = tuple((draw.choice(sorted(STEPS)), draw.randrange(2**16)) for _ in range(draw.randrange(1, 6)))
    recipe, on, mesh = Recipe(shape, steps), random_cluster(draw), {"ranks": 2}
    model, batch = recipe.module(), recipe.sample()
    plan = sharding.plan(model, batch, on, loss=summed, mesh=mesh, micro_batches=1, recompute=False)
    hints: dict[str, dict[str, Any]] = {
        "data parallel": {"*": sharding.Replicate(), "inputs": sharding.Split(0)},
        "fully sharded": {"*": sharding.Split(0)},
    }
    for layout, of_layout in hints.items():
        try:
            by_hints = sharding.plan(
                model, batch, on, of_layout, loss=summed, mesh=mesh, micro_batches=1, recompute=False
            )
        except SpecError:  # a module that cannot be split so
            continue
        assert plan.step_s <= by_hints.step_s * WITHIN_ERROR * WITHIN_GAP, layout
    fastest_s = min(each.step_s for each in plan.considered if each.step_s is not None)
    as_good = [each for each in plan.considered if each.step_s and each.step_s <= fastest_s * WITHIN_ERROR]
    assert plan.layout == min((each.layout for each in as_good), key=BY_SIMPLICITY.index)
    assert plan.step_s in [each.step_s for each in as_good]


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def linked(bytes_per_s: float, memory_bytes: int = 8 << 30) -> Cluster:
    links = [{"devices": 2, "bytes_per_s": bytes_per_s, "latency_s": 1e-6}]
    plain = cores(2).model_dump(exclude_none=True)
    return Cluster.model_validate(plain | {"links": links, "memory_bytes": memory_bytes})


def test_data_parallelism_where_it_is_as_fast():
    plan = sharding.plan(Perceptron(64), (torch.zeros(4096, 64),), linked(1e12))
    assert plan.layout == "data parallel"
    assert set(plan.parameters.values()) == {"R"}
    assert {each.kind for each in plan.collectives} == {"all_reduce"}


def test_sharded_parameters_where_data_parallelism_has_no_room():
    model, batch = Perceptron(512), (torch.zeros(4096, 512),)
    plan = sharding.plan(model, batch, linked(1e12, 38 << 20), micro_batches=1, recompute=False)
    assert plan.layout == "fully sharded"
    assert {plan.parameters[f"layers.{number}.weight"] for number in (0, 2)} == {"S(0)"}
    assert "data parallel" not in [each.layout for each in plan.considered]


def test_hints_decide_where_there_are_any():
    hints, batch = {"*": sharding.Split(0)}, (torch.zeros(64, 64),)
    for search, layout in ((True, "searched"), (False, "from hints")):
        plan = sharding.plan(Perceptron(64), batch, linked(1e9), hints, mesh={"ranks": 2}, search=search)
        assert [each.layout for each in plan.considered] == [plan.layout] == [layout]
