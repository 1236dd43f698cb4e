"""Torch's wrappers for data-parallel training are refused around applied modules, and parameters stay as they were."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from moe import sharding
from tests.parity.gloo_ranks import Pools
from tests.sharding.odd import odd
from tests.sharding.on_ranks import cores


def wrapped_on_ranks() -> list[str]:
    """What is said of each wrapper; empty where it was accepted, and where a parameter changed."""
    module, batch = odd()
    hints = {"*.weight": sharding.Split(0)}
    applied = sharding.apply(module, sharding.plan(module, batch, cores(2), hints, mesh={"all": 2}))
    mesh = init_device_mesh("cpu", (2,))
    before = {name: shard.part.clone() for name, shard in applied.shards().items()}
    wrappers: list[Callable[[], Any]] = [
        lambda: DistributedDataParallel(applied),
        lambda: DistributedDataParallel(nn.Sequential(applied)),
        lambda: FullyShardedDataParallel(applied, device_id=torch.device("cpu")),
        lambda: DataParallel(applied),
        lambda: DistributedDataParallel(applied.get_submodule("first")),
        lambda: DataParallel(nn.Sequential(applied.get_submodule("first"))),
        lambda: fully_shard(applied, mesh=mesh),
        lambda: fully_shard(applied.get_submodule("first"), mesh=mesh),
        lambda: fully_shard(nn.Sequential(applied, nn.Linear(2, 2)), mesh=mesh),
        lambda: fully_shard(nn.Sequential(applied.get_submodule("first")), mesh=mesh),
    ]
    said = []
    for wrap in wrappers:
        try:
            wrap()
            said.append("")
        except TypeError as error:
            said.append(str(error))
    for name, shard in applied.shards().items():
        if not torch.equal(shard.part, before[name]):
            said.append("")
    applied(*batch).backward()
    DistributedDataParallel(nn.Linear(2, 2))  # others are wrapped as ever
    fully_shard(nn.Linear(2, 2), mesh=mesh)
    sharding.close(applied)
    return said


def test_wrappers_of_torch_are_refused_by_name(ranks: Pools):
    names = (
        ["DistributedDataParallel"] * 2
        + ["FullyShardedDataParallel", "DataParallel", "DistributedDataParallel", "DataParallel"]
        + ["fully_shard"] * 4
    )
    for said in ranks[2].run(wrapped_on_ranks):
        assert len(said) == len(names)
        assert all(words.startswith(f"{name} must not wrap") for name, words in zip(names, said, strict=True))
