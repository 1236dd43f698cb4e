"""Parameters of applied modules are DTensors: torch's own checkpoints, clipping and norms are those of one device."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from moe import sharding
from moe.sharding.placement import split
from tests.parity.gloo_ranks import Pools
from tests.sharding.odd import odd, random_hints
from tests.sharding.on_ranks import cores

Mesh = dict[str, int]
MESHES: tuple[Mesh, ...] = ({"a": 2}, {"a": 4}, {"a": 2, "b": 2})
EVERYTHING = {"*": sharding.Split(0)}
"""Over two axes, uneven dimensions are cut otherwise by DTensor than programs take them."""


def applied_on(mesh: Mesh, seed: int) -> tuple[nn.Module, sharding.Applied, Any]:
    module, batch = odd(seed)
    hints = random_hints(module, mesh, random.Random(seed)) if seed else EVERYTHING
    plan = sharding.plan(module, batch, cores(math.prod(mesh.values())), hints, mesh=mesh)
    return module, sharding.apply(module, plan), batch


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, num_steps: int) -> list[float]:
    """Losses and norms."""
    found = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        found += [float(loss.detach()), float(norm)]
    return found


def differing(module: nn.Module, applied: sharding.Applied) -> list[str]:
    wrong = []
    for name, whole in module.named_parameters():
        parameter = applied.get_parameter(name)
        if not isinstance(parameter, DTensor) or parameter.shape != whole.shape:
            wrong.append(f"{name} is {type(parameter).__name__} {list(parameter.shape)}")
        elif not torch.allclose(parameter.full_tensor(), whole, rtol=1e-10, atol=1e-10):
            wrong.append(f"value of {name}")
        if whole.grad is not None and not torch.allclose(parameter.grad.full_tensor(), whole.grad, atol=1e-10):
            wrong.append(f"gradient of {name}")
    return wrong


def trained_on_ranks(mesh: Mesh, seed: int) -> list[str]:
    """What differs from one device after steps with clipping."""
    module, applied, batch = applied_on(mesh, seed)
    found, expected = (steps(each, torch.optim.AdamW(each.parameters(), 1e-2), batch, 3) for each in (applied, module))
    wrong = [] if torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-10) else [f"{found} {expected}"]
    for norm_type in (1.0, 2.0, 3.0):  # of empty shards torch itself has no largest value
        norms = [get_total_norm([p.grad for p in each.parameters() if p.grad is not None], norm_type)
                 for each in (applied, module)]  # fmt: skip
        if not math.isclose(float(norms[0].full_tensor()), float(norms[1]), rel_tol=1e-9):
            wrong.append(f"norm {norm_type}: {norms}")
    wrong += differing(module, applied)
    sharding.close(applied)
    return wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_steps_with_torchs_clipping_are_those_of_one_device(ranks: Pools, mesh: Mesh, seed: int):
    world = math.prod(mesh.values())
    assert ranks[world].run(trained_on_ranks, mesh, seed) == [[]] * world


def saved_on_ranks(mesh: Mesh, seed: int, folder: str) -> None:
    """By torch.distributed.checkpoint, with the optimizer, after some steps."""
    _, applied, batch = applied_on(mesh, seed)
    optimizer = torch.optim.AdamW(applied.parameters(), 1e-2)
    steps(applied, optimizer, batch, 2)
    model, state = get_state_dict(applied, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder)
    dcp.save(applied.state_dict(), checkpoint_id=f"{folder}/model")
    sharding.close(applied)


def loaded_on_ranks(mesh: Mesh, seed: int, folder: str) -> list[str]:
    """What differs, after steps that follow, from one device that took all of them."""
    module, batch = odd(0)
    expected_optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    steps(module, expected_optimizer, batch, 2)
    wrong = []
    for whole in (False, True):
        _, applied, _ = applied_on(mesh, seed)
        with torch.no_grad():
            for parameter in applied.parameters():
                parameter.zero_()
        optimizer = torch.optim.AdamW(applied.parameters(), 1.0)
        if whole:
            state = applied.state_dict()
            dcp.load(state, checkpoint_id=f"{folder}/model")
            applied.load_state_dict(state)
            wrong += [f"alone: {name}" for name, value in module.named_parameters()
                      if not torch.allclose(applied.get_parameter(name).full_tensor(), value, atol=1e-12)]  # fmt: skip
            wrong += [f"alone: {name}" for name, value in module.named_buffers() if value.is_floating_point()
                      and not torch.allclose(whole_of(applied.get_buffer(name)), value, atol=1e-12)]  # fmt: skip
        else:
            model, state = get_state_dict(applied, optimizer)
            dcp.load(
                {"model": model, "optimizer": state}, checkpoint_id=folder,
                planner=DefaultLoadPlanner(allow_partial_load=True),  # torch saves no state of what nothing uses
            )  # fmt: skip
            set_state_dict(applied, optimizer, model_state_dict=model, optim_state_dict=state)
            found = steps(applied, optimizer, batch, 2)
            expected = steps(module, expected_optimizer, batch, 2)
            if not torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-9):
                wrong.append(f"{found} for {expected}")
            wrong += differing(module, applied)
            module, _ = odd(0)
            steps(module, torch.optim.AdamW(module.parameters(), 1e-2), batch, 2)
        sharding.close(applied)
    return wrong


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"a": 2}, {"a": 4}, marks=pytest.mark.slow),
        ({"a": 2, "b": 2}, {"a": 2}),
        pytest.param({"a": 4}, {"a": 2, "b": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_torchs_checkpoints_go_on_at_any_other_plan(ranks: Pools, tmp_path: Path, before: Mesh, after: Mesh):
    ranks[math.prod(before.values())].run(saved_on_ranks, before, 0, str(tmp_path))
    world = math.prod(after.values())
    assert ranks[world].run(loaded_on_ranks, after, 0, str(tmp_path)) == [[]] * world


def plain_loaded_on_ranks(mesh: Mesh) -> list[str]:
    """Whole tensors of the plain module, with another's values, in `load_state_dict`."""
    _, applied, _ = applied_on(mesh, 0)
    other, _ = odd(5)
    applied.load_state_dict(other.state_dict())
    wrong = [name for name, whole in other.named_parameters()
             if not torch.equal(applied.get_parameter(name).full_tensor(), whole)]  # fmt: skip
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        applied.load_state_dict(other.state_dict() | {"first.weight": torch.zeros(1, 5).double()})
    whole = sharding.state_dict(applied)
    if dist.get_rank() == 0:
        wrong += [name for name, value in other.state_dict().items() if not torch.equal(whole[name], value)]
    sharding.close(applied)
    return wrong


def test_whole_tensors_are_cut_when_they_are_loaded(ranks: Pools):
    assert ranks[4].run(plain_loaded_on_ranks, {"a": 2, "b": 2}) == [[]] * 4


def three_axes_on_ranks(sizes: tuple[int, ...]) -> list[str]:
    """Shards and parts of a dimension that three axes split, to and fro."""
    from moe.sharding.applied.dtensors import as_dtensor, cut, from_program, to_program
    from moe.sharding.exchange.exchange import part_of, strip_padding
    from moe.sharding.exchange.mesh import ShardingMesh

    mesh, wrong = ShardingMesh.over((2, 2, 1)), []
    for size in sizes:
        whole, placements = torch.arange(float(size * 2)).view(size, 2), (split(0), split(0), split(0))
        shard = cut(whole, placements, mesh)
        part = to_program(shard, whole.shape, placements, mesh)
        if not torch.equal(part, strip_padding(part_of(whole, placements, mesh), whole.shape, placements, mesh)):
            wrong.append(f"part of {size}")
        if not torch.equal(from_program(part, whole.shape, placements, mesh), shard):
            wrong.append(f"shard of {size}")
        if not torch.equal(as_dtensor(shard, whole.shape, placements, mesh).full_tensor(), whole):
            wrong.append(f"DTensor of {size}")
    return wrong


def test_shards_and_parts_are_of_the_same_whole(ranks: Pools):
    assert ranks[4].run(three_axes_on_ranks, (1, 2, 3, 5, 6, 7, 8, 9, 13)) == [[]] * 4


def test_on_one_device_parameters_are_plain():
    module, batch = odd()
    applied = sharding.apply(module, sharding.plan(module, batch, cores(1), mesh={"a": 1}))
    assert not any(isinstance(each, DTensor) for each in applied.state_dict().values())
