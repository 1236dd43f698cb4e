"""Modules planned and applied on gloo ranks, compared with one device: losses, outputs and every gradient."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe import sharding
from moe.plan import Cluster
from moe.sharding.applied.dtensors import local
from tests.parity.gloo_ranks import Pools

Built = tuple[nn.Module, tuple[Any, ...]]
Hints = Mapping[str, sharding.Split | sharding.Replicate | sharding.Shard]


def cores(num_devices: int, memory_bytes: int = 1 << 33) -> Cluster:
    """Cores joined by links without latency: only bytes and arithmetic decide, also for small modules."""
    return Cluster.model_validate({
        "num_nodes": 1, "devices_per_node": num_devices, "device": "cpu", "memory_bytes": memory_bytes,
        "links": [{"devices": num_devices, "bytes_per_s": 1e10, "latency_s": 0.0}],
    })  # fmt: skip


def apply_on_one_device(module: nn.Module, *sample: Any, **options: Any) -> sharding.Applied:
    """A module planned for one device and applied there; `options` are those of `sharding.plan`."""
    plan = sharding.plan(module, sample, cores(1), mesh={"devices": 1}, **options)
    return sharding.apply(module, plan, sample=sample, loss=options.get("loss"))


def shard_of_whole(applied: sharding.Applied, name: str, full_tensor: Tensor) -> Tensor:
    """This rank's shard of a full tensor."""
    shard = applied.shards()[name]
    return full_tensor.detach()[
        tuple(slice(offset, offset + size) for offset, size in zip(shard.offsets, shard.part.shape, strict=True))
    ]


def unlike(
    applied: sharding.Applied,
    module: nn.Module,
    kinds: Collection[str] = ("gradient", "value", "buffer"),
    tolerance: float = 1e-10,
) -> list[str]:
    """Gradients and values of parameters, and buffers, that differ on this rank from those of the module on one
    device. A gradient may be missing where the other is zero."""
    shards, wrong = applied.shards(), []
    pairs: list[tuple[str, str, Tensor | None, Tensor | None]] = []
    for name, parameter in module.named_parameters():
        gradient = applied.get_parameter(name).grad
        pairs += [("gradient", name, None if gradient is None else local(gradient), parameter.grad)]
        pairs += [("value", name, shards[name].part, parameter)]
    pairs += [("buffer", name, shards[name].part, buffer) for name, buffer in module.named_buffers()]
    for kind, name, part, full_tensor in pairs:
        if kind not in kinds:
            continue
        if part is None or full_tensor is None:
            if any(tensor is not None and tensor.any() for tensor in (part, full_tensor)):
                wrong.append(f"{kind} of {name} is {part} for {full_tensor}")
        elif not is_close(part.detach(), shard_of_whole(applied, name, full_tensor), tolerance):
            wrong.append(f"{kind} of {name}")
    return wrong


def differences(
    build: Callable[[], Built],
    mesh: Mapping[str, int],
    hints: Hints | None = None,
    memory_bytes: int = 1 << 33,
    steps: int = 1,
    tolerance: float = 1e-10,
    scale: float = 1.0,
    **options: Any,
) -> tuple[list[str], sharding.ShardingPlan]:
    """(differences on this rank from one device, plan), after some steps of SGD on the same batch. Gradients are
    those of `scale` times the loss."""
    module, sample = build()
    cluster = cores(math.prod(mesh.values()), memory_bytes)
    plan = sharding.plan(module, sample, cluster, hints, mesh=mesh, **options)
    applied = sharding.apply(module, plan, sample=sample)
    wrong: list[str] = []
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (applied, module)]
    for step in range(steps):
        losses = []
        for model, optimizer in zip((applied, module), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(pytree.tree_leaves(model(*sample))[0])
            (scale * losses[-1]).backward()
        if not is_close(losses[0].detach(), losses[1].detach(), tolerance):
            wrong.append(f"loss of step {step}: {losses[0]} for {losses[1]}")
        wrong += [
            f"{difference} in step {step}" for difference in unlike(applied, module, ("gradient", "value"), tolerance)
        ]
        for optimizer in optimizers:
            optimizer.step()
    wrong += unlike(applied, module, ("buffer",), tolerance)
    sharding.close(applied)
    return [f"rank {dist.get_rank()}: {difference}" for difference in wrong], plan


def check_on_ranks(
    ranks: Pools, build: Callable[[], Built], mesh: Mapping[str, int], hints: Hints | None = None, **options: Any
) -> sharding.ShardingPlan:
    """Fail if `differences` are found on gloo ranks; return the plan. `build` is sent to the ranks."""
    results = ranks[math.prod(mesh.values())].run(_differences, build, mesh, hints, options)
    assert [wrong for wrong, _ in results] == [[]] * len(results)
    plan: sharding.ShardingPlan = results[0][1]
    return plan


def _differences(build: Any, mesh: Any, hints: Any, options: dict[str, Any]) -> tuple[list[str], sharding.ShardingPlan]:
    return differences(build, mesh, hints, **options)


def is_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return torch.equal(actual, expected)
    scale = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * scale)
