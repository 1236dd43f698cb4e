"""Optimizer states, gradients and parameters sharded over data-parallel ranks by hints (ZeRO, arXiv 1910.02054)."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from moe.sharding.applied.dtensors import local
from tests.parity.gloo_ranks import Pools
from tests.refusals import expect_problem
from tests.sharding.odd import odd
from tests.sharding.on_ranks import Built, check_on_ranks, cores

REPLICATE, SPLIT = sharding.Replicate(), sharding.Split(0)
STATES = {"*": REPLICATE, "optimizer.*": SPLIT}
STATES_AND_GRADIENTS = {"*": REPLICATE, "gradients.*": SPLIT, "optimizer.*": SPLIT}
ALL = {"*": SPLIT}
MESHES = (*(pytest.param({"a": size}, marks=pytest.mark.slow) for size in (2, 4)), {"a": 2, "b": 2})
HINTS = {"states": STATES, "states and gradients": STATES_AND_GRADIENTS, "all": ALL}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def layers() -> Built:
    torch.manual_seed(0)
    return Layers().double(), (torch.randn(512, 16, dtype=torch.float64),)


def memory_errors_on_ranks(mesh: dict[str, int], hints: str) -> dict[str, int]:
    """Predicted minus actual bytes on this rank."""
    module, batch = layers()
    plan = sharding.plan(module, batch, cores(math.prod(mesh.values())), HINTS[hints], mesh=mesh)
    applied = sharding.apply(module, plan)
    optimizer = torch.optim.AdamW(applied.parameters())
    applied(*batch).backward()
    optimizer.step()
    parameters = list(applied.parameters())
    slots = [slot for state in optimizer.state.values() for name, slot in state.items() if name != "step"]
    sharding.close(applied)
    return {
        "parameters": plan.memory.parameters - sum(local(parameter).nbytes for parameter in parameters),
        "gradients": plan.memory.gradients - sum(local(parameter.grad).nbytes for parameter in parameters),
        "optimizer": plan.memory.optimizer - sum(local(slot).nbytes for slot in slots),
        "share": sum(local(parameter).nbytes for parameter in parameters) * math.prod(mesh.values())
        - sum(parameter.nbytes for parameter in module.parameters()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("hints", HINTS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_rank_has_its_share_of_states_as_predicted(ranks: Pools, mesh: dict[str, int], hints: str):
    for differences in ranks[math.prod(mesh.values())].run(memory_errors_on_ranks, mesh, hints):
        assert differences == {"parameters": 0, "gradients": 0, "optimizer": 0, "share": 0}


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_uneven", [pytest.param(False, marks=pytest.mark.grid), True], ids=["even", "uneven"])
@pytest.mark.parametrize("hints", HINTS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_results_are_those_of_one_device(ranks: Pools, mesh: dict[str, int], hints: str, is_uneven: bool):
    check_on_ranks(ranks, odd if is_uneven else layers, mesh, HINTS[hints], steps=3)


def collectives(hints: dict[str, sharding.Replicate | sharding.Split]) -> Counter[tuple[str, str]]:
    """Collectives of a step on four ranks by phase and kind, without those of one number."""
    module, batch = layers()
    plan = sharding.plan(module, batch, cores(4), hints, mesh={"a": 4})
    return Counter((collective.phase, collective.kind) for collective in plan.collectives if collective.num_bytes > 8)


@pytest.mark.slow
def test_gradients_are_reduced_and_scattered_and_parameters_gathered_once_a_step():
    assert collectives({"layers.*": REPLICATE}) == {("backward", "all_reduce"): 8}
    expected = {("forward", "gather"): 8, ("backward", "reduce_scatter"): 8}
    assert collectives(STATES) == collectives(STATES_AND_GRADIENTS) == expected


def test_split_parameters_are_gathered_again_for_the_backward_pass():
    module, batch = layers()
    states_plan, sharded_plan = (
        sharding.plan(module, batch, cores(4), hints, mesh={"a": 4}) for hints in (STATES, ALL)
    )
    assert sharded_plan.memory.kept < states_plan.memory.kept
    counts = Counter(
        (collective.phase, collective.kind) for collective in sharded_plan.collectives if collective.num_bytes > 8
    )
    assert counts["backward", "reduce_scatter"] == 8
    assert ("backward", "all_reduce") not in counts
    # In full, or part by part around a ring. The first weight is gathered once: its input needs no gradient.
    gathers = {phase: counts[phase, "gather"] + counts[phase, "ring"] for phase in ("forward", "backward")}
    assert gathers["forward"] == 8
    assert gathers["backward"] >= 3


@pytest.mark.slow
def test_patterns_leave_scalars_whole():
    module, batch = odd()
    for hints in HINTS.values():
        plan = sharding.plan(module, batch, cores(2), hints, mesh={"a": 2})
        assert plan.parameters["scale"] == plan.parameters["norm.num_batches_tracked"] == "R"
        assert plan.parameters["shift"] == "S(0)"


def test_tensors_without_the_split_dimension_are_refused_by_name():
    module, batch = odd()
    for pattern, name in (("optimizer.scale", "scale"), ("last.*", "last.bias")):
        with expect_problem("out_of_range", f"hints['{pattern}'] ({name})", "Split(1)"):
            sharding.plan(module, batch, cores(2), {pattern: sharding.Split(1)}, mesh={"a": 2})
