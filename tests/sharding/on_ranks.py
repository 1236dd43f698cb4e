"""A module planned, applied on gloo ranks, and held against one device: loss, outputs and every gradient."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe import sharding
from moe.plan import Cluster
from moe.sharding.applied.dtensors import local

Built = tuple[nn.Module, tuple[Any, ...]]


def cores(num_devices: int, memory_bytes: int = 1 << 33) -> Cluster:
    """Cores joined by links without latency, so that arithmetic and bytes alone decide, however small a module is."""
    return Cluster.model_validate({
        "num_nodes": 1, "devices_per_node": num_devices, "device": "cpu", "memory_bytes": memory_bytes,
        "links": [{"devices": num_devices, "bytes_per_s": 1e10, "latency_s": 0.0}],
    })  # fmt: skip


def differences(
    build: Callable[[], Built],
    mesh: Mapping[str, int],
    hints: Mapping[str, sharding.Split | sharding.Replicate | sharding.Shard] | None = None,
    memory_bytes: int = 1 << 33,
    steps: int = 1,
    tolerance: float = 1e-10,
    **options: Any,
) -> tuple[list[str], sharding.ShardingPlan]:
    """(what is not as on one device, on this rank; the plan), after some steps of SGD on the same batch."""
    module, sample = build()
    cluster = cores(math.prod(mesh.values()), memory_bytes)
    plan = sharding.plan(module, sample, cluster, hints, mesh=mesh, **options)
    applied = sharding.apply(module, plan, sample=sample)
    wrong: list[str] = []
    ours = torch.optim.SGD(applied.parameters(), 0.05)
    theirs = torch.optim.SGD(module.parameters(), 0.05)
    for step in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        found, expected = _first(applied(*sample)), _first(module(*sample))
        found.backward()
        expected.backward()
        if not _close(found.detach(), expected.detach(), tolerance):
            wrong.append(f"loss of step {step}: {found} for {expected}")
        for name, whole in module.named_parameters():
            here = applied.get_parameter(name)
            shard = applied.shard_of(name, here)
            grad = None if here.grad is None else local(here.grad)
            for what, mine, all_of_it in (("gradient", grad, whole.grad), ("value", shard.part, whole)):
                if all_of_it is None or mine is None:
                    if (mine is None or not mine.any()) and (all_of_it is None or not all_of_it.any()):
                        continue
                    wrong.append(f"{what} of {name} is missing")
                    continue
                cut = tuple(slice(at, at + size) for at, size in zip(shard.offsets, mine.shape, strict=True))
                if not _close(mine.detach(), all_of_it.detach()[cut], tolerance):
                    wrong.append(f"{what} of {name} in step {step}")
        ours.step()
        theirs.step()
    for name, whole in module.named_buffers():
        shard = applied.shards()[name]
        cut = tuple(slice(at, at + size) for at, size in zip(shard.offsets, shard.part.shape, strict=True))
        if not _close(shard.part, whole[cut], tolerance):
            wrong.append(f"buffer {name}")
    sharding.close(applied)
    return [f"rank {dist.get_rank()}: {each}" for each in wrong], plan


def _first(returned: Any) -> Tensor:
    """The loss comes first in whatever a module returns."""
    return pytree.tree_leaves(returned)[0]


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if found.shape != expected.shape:
        return False
    if not expected.dtype.is_floating_point:
        return torch.equal(found, expected)
    scale = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * scale)
