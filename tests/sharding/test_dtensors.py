"""Parameters of applied modules are DTensors: torch's checkpoints, clipping and norms are those of one device."""

import math
import random
from collections.abc import Sequence
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
from moe.sharding.applied.dtensors import as_dtensor, cut, from_program, to_program
from moe.sharding.exchange.exchange import part_of, strip_padding
from moe.sharding.exchange.mesh import ShardingMesh
from moe.sharding.placement import split
from tests.parity.gloo_ranks import Pools
from tests.sharding.odd import odd, random_hints
from tests.sharding.on_ranks import apply_on_one_device, cores

Mesh = dict[str, int]
MESHES: tuple[Mesh, ...] = ({"a": 2}, {"a": 4}, {"a": 2, "b": 2})
EVERYTHING = {"*": sharding.Split(0)}
"""Over two axes, DTensor splits uneven dimensions differently from programs."""


def applied_on(mesh: Mesh, seed: int) -> tuple[nn.Module, sharding.Applied, Any]:
    module, batch = odd(seed)
    hints = random_hints(module, mesh, random.Random(seed)) if seed else EVERYTHING
    plan = sharding.plan(module, batch, cores(math.prod(mesh.values())), hints, mesh=mesh)
    return module, sharding.apply(module, plan), batch


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, num_steps: int) -> list[float]:
    """Losses and gradient norms."""
    numbers = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        numbers += [float(loss.detach()), float(full_tensor(norm))]
    return numbers


def full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(
    module: nn.Module, applied: sharding.Applied, kinds: Sequence[str] = ("value", "gradient")
) -> list[str]:
    """Names of tensors that differ from the module's when torch gathers them. Integer buffers are left out."""
    pairs = [("buffer", name, applied.get_buffer(name), buffer) for name, buffer in module.named_buffers()]
    for name, full_parameter in module.named_parameters():
        parameter = applied.get_parameter(name)
        assert isinstance(parameter, DTensor)
        pairs.append(("value", name, parameter, full_parameter))
        if full_parameter.grad is not None:
            pairs.append(("gradient", name, parameter.grad, full_parameter.grad))
    return [
        f"{kind} of {name}"
        for kind, name, tensor, expected in pairs
        if kind in kinds
        and expected.is_floating_point()
        and (tensor.shape != expected.shape or not torch.allclose(full_tensor(tensor), expected, atol=1e-10))
    ]


def train_on_ranks(mesh: Mesh, seed: int) -> list[str]:
    """Differences from one device after steps with clipping."""
    module, applied, batch = applied_on(mesh, seed)
    pair = [steps(model, torch.optim.AdamW(model.parameters(), 1e-2), batch, 3) for model in (applied, module)]
    wrong = [] if pair[0] == pytest.approx(pair[1], rel=1e-10) else [str(pair)]
    for norm_type in (1.0, 2.0, 3.0):  # torch has no maximum of empty shards
        norms = [get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm_type)
                 for model in (applied, module)]  # fmt: skip
        if not math.isclose(float(norms[0].full_tensor()), float(norms[1]), rel_tol=1e-9):
            wrong.append(f"norm {norm_type}: {norms}")
    wrong += differences(module, applied)
    sharding.close(applied)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_steps_with_torchs_clipping_equal_one_device(ranks: Pools, mesh: Mesh, seed: int):
    world = math.prod(mesh.values())
    assert ranks[world].run(train_on_ranks, mesh, seed) == [[]] * world


def save_on_ranks(mesh: Mesh, folder: str) -> None:
    """By torch.distributed.checkpoint, with the optimizer, after some steps."""
    _, applied, batch = applied_on(mesh, 0)
    optimizer = torch.optim.AdamW(applied.parameters(), 1e-2)
    steps(applied, optimizer, batch, 2)
    model, state = get_state_dict(applied, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder)
    dcp.save(applied.state_dict(), checkpoint_id=f"{folder}/model")
    sharding.close(applied)


def load_on_ranks(mesh: Mesh, folder: str) -> list[str]:
    """Differences from one device that took all steps, after loading the module alone, and after loading it with the
    optimizer and further steps."""
    module, batch = odd(0)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    steps(module, optimizer, batch, 2)
    _, applied, _ = applied_on(mesh, 0)
    with torch.no_grad():
        for parameter in applied.parameters():
            parameter.zero_()
    state = applied.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/model")
    applied.load_state_dict(state)
    wrong = differences(module, applied, ("value", "buffer"))
    sharding.close(applied)
    _, applied, _ = applied_on(mesh, 0)
    restored_optimizer = torch.optim.AdamW(applied.parameters(), 1.0)
    model, state = get_state_dict(applied, restored_optimizer)
    planner = DefaultLoadPlanner(allow_partial_load=True)  # torch saves no state of unused parameters
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=folder, planner=planner)
    set_state_dict(applied, restored_optimizer, model_state_dict=model, optim_state_dict=state)
    pair = steps(applied, restored_optimizer, batch, 2), steps(module, optimizer, batch, 2)
    wrong += [] if pair[0] == pytest.approx(pair[1], rel=1e-9) else [str(pair)]
    wrong += differences(module, applied)
    sharding.close(applied)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [({"a": 2}, {"a": 4}), ({"a": 2, "b": 2}, {"a": 2}), ({"a": 4}, {"a": 2, "b": 2})], ids=str
)
def test_training_resumes_from_torchs_checkpoints_at_another_plan(
    ranks: Pools, tmp_path: Path, before: Mesh, after: Mesh
):
    ranks[math.prod(before.values())].run(save_on_ranks, before, str(tmp_path))
    world = math.prod(after.values())
    assert ranks[world].run(load_on_ranks, after, str(tmp_path)) == [[]] * world


def load_plain_on_ranks(mesh: Mesh) -> list[str]:
    """Load full tensors of a plain module with other values by `load_state_dict`."""
    _, applied, _ = applied_on(mesh, 0)
    other_module, _ = odd(5)
    applied.load_state_dict(other_module.state_dict())
    wrong = differences(other_module, applied, ("value",))
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        applied.load_state_dict(other_module.state_dict() | {"first.weight": torch.zeros(1, 5).double()})
    state = sharding.state_dict(applied)
    if dist.get_rank() == 0:
        wrong += [name for name, value in other_module.state_dict().items() if not torch.equal(state[name], value)]
    sharding.close(applied)
    return wrong


@pytest.mark.slow
def test_whole_tensors_are_sharded_when_loaded(ranks: Pools):
    assert ranks[4].run(load_plain_on_ranks, {"a": 2, "b": 2}) == [[]] * 4


def three_axes_on_ranks(sizes: tuple[int, ...]) -> list[str]:
    """Differences between shards and parts of a dimension that three axes split, in both directions."""
    mesh, wrong = ShardingMesh.from_degrees((2, 2, 1)), []
    for size in sizes:
        tensor, placements = torch.arange(float(size * 2)).view(size, 2), (split(0), split(0), split(0))
        shard = cut(tensor, placements, mesh)
        part = to_program(shard, tensor.shape, placements, mesh)
        if not torch.equal(part, strip_padding(part_of(tensor, placements, mesh), tensor.shape, placements, mesh)):
            wrong.append(f"part of {size}")
        if not torch.equal(from_program(part, tensor.shape, placements, mesh), shard):
            wrong.append(f"shard of {size}")
        if not torch.equal(as_dtensor(shard, tensor.shape, placements, mesh).full_tensor(), tensor):
            wrong.append(f"DTensor of {size}")
    return wrong


def test_shards_and_parts_have_the_same_whole(ranks: Pools):
    assert ranks[4].run(three_axes_on_ranks, (1, 2, 3, 5, 6, 7, 8, 9, 13)) == [[]] * 4


def test_on_one_device_parameters_are_plain():
    module, batch = odd()
    applied = apply_on_one_device(module, *batch)
    assert not any(isinstance(tensor, DTensor) for tensor in applied.state_dict().values())
