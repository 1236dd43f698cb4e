"""Without hints, no plan is predicted slower than DDP or FSDP by more than the error of predictions. If either is as
good as the best plan of the search, it is chosen."""

import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from moe import sharding
from moe.plan import Cluster
from moe.plan.search.spread import WITHIN_ERROR
from moe.sharding.solve.strategies import BY_SIMPLICITY
from moe.spec import SpecError
from tests.sharding.modules import perceptron
from tests.sharding.on_ranks import cores
from tests.sharding.random_modules import STEPS, Recipe

WITHIN_GAP = 1.01
"""Factor between the optimum of a large integer program and the solution."""


def sum_of_squares(outputs: tuple[Tensor, ...]) -> Tensor:
    return sum((output.square().sum() for output in outputs), torch.zeros(()))


def make_cluster(bytes_per_s: float, memory_bytes: int = 8 << 30, latency_s: float = 1e-6) -> Cluster:
    links = [{"devices": 2, "bytes_per_s": bytes_per_s, "latency_s": latency_s}]
    return Cluster.model_validate(cores(2, memory_bytes).model_dump(exclude_none=True) | {"links": links})


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_slower_than_ddp_or_fsdp(seed: int):
    draw = random.Random(seed)
    shape = (draw.choice([2, 4, 6]), *draw.choices(range(1, 7), k=draw.randrange(1, 3)))
    steps = tuple((draw.choice(sorted(STEPS)), draw.randrange(2**16)) for _ in range(draw.randrange(1, 6)))
    recipe = Recipe(shape, steps)
    cluster = make_cluster(10 ** draw.uniform(5, 12), latency_s=draw.choice([0.0, 1e-7, 1e-5]))

    def make_plan(hints: dict[str, Any] | None = None) -> sharding.ShardingPlan:
        options = {"loss": sum_of_squares, "mesh": {"ranks": 2}, "micro_batches": 1, "recompute": False}
        return sharding.plan(recipe.module(), recipe.sample(), cluster, hints, **options)

    plan = make_plan()
    for hints in ({"*": sharding.Replicate(), "inputs": sharding.Split(0)}, {"*": sharding.Split(0)}):
        with suppress(SpecError):  # of modules that cannot be split this way
            assert plan.step_s <= make_plan(hints).step_s * WITHIN_ERROR * WITHIN_GAP, hints
    fastest_s = min(candidate.step_s for candidate in plan.considered if candidate.step_s is not None)
    fast_candidates = [
        candidate for candidate in plan.considered if candidate.step_s and candidate.step_s <= fastest_s * WITHIN_ERROR
    ]
    assert plan.layout == min((candidate.layout for candidate in fast_candidates), key=BY_SIMPLICITY.index)
    assert plan.step_s in [candidate.step_s for candidate in fast_candidates]


def test_data_parallelism_where_it_is_as_fast():
    plan = sharding.plan(perceptron(64, 64, 64), (torch.zeros(4096, 64),), make_cluster(1e12))
    assert plan.layout == "data parallel"
    assert set(plan.parameters.values()) == {"R"}
    assert {collective.kind for collective in plan.collectives} == {"all_reduce"}


@pytest.mark.slow
def test_sharded_parameters_where_data_parallelism_does_not_fit():
    model, batch = perceptron(512, 512, 512), (torch.zeros(4096, 512),)
    plan = sharding.plan(model, batch, make_cluster(1e12, 38 << 20), micro_batches=1, recompute=False)
    assert plan.layout == "fully sharded"
    assert {plan.parameters[f"layers.{number}.weight"] for number in (0, 2)} == {"S(0)"}
    assert "data parallel" not in [candidate.layout for candidate in plan.considered]


def test_hints_decide_where_there_are_any():
    hints, batch = {"*": sharding.Split(0)}, (torch.zeros(64, 64),)
    for search, layout in ((True, "searched"), (False, "from hints")):
        plan = sharding.plan(perceptron(64, 64, 64), batch, make_cluster(1e9), hints, mesh={"ranks": 2}, search=search)
        assert [candidate.layout for candidate in plan.considered] == [plan.layout] == [layout]
