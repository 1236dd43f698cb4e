"""Torch's wrappers for data-parallel training are refused around applied modules and leave parameters unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
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
    """Errors of each wrapper, which leave parameters unchanged."""
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
    messages = []
    for wrap in wrappers:
        with pytest.raises(TypeError) as error:
            wrap()
        messages.append(str(error.value))
    assert all(torch.equal(shard.part, before[name]) for name, shard in applied.shards().items())
    applied(*batch).backward()
    DistributedDataParallel(nn.Linear(2, 2))  # other modules can be wrapped
    fully_shard(nn.Linear(2, 2), mesh=mesh)
    sharding.close(applied)
    return messages


@pytest.mark.slow
def test_wrappers_of_torch_are_refused_by_name(ranks: Pools):
    data_parallel, ddp = "DataParallel", "DistributedDataParallel"
    names = [ddp, ddp, "FullyShardedDataParallel", data_parallel, ddp, data_parallel]
    names += ["fully_shard"] * 4
    for messages in ranks[2].run(wrapped_on_ranks):
        assert [message.partition(" must not wrap")[0] for message in messages] == names
