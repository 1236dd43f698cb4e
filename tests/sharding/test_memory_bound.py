"""Steps stay within the memory of the plan's cluster: live bytes of tensors on each of two ranks."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from moe import sharding
from moe.sharding.applied.dtensors import local
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import cores


class LiveBytes(TorchDispatchMode):
    """Bytes of live tensors that operators created: current and peak."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._sizes: dict[int, int] = {}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type == "meta" or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.current += storage.nbytes()
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.current -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, Tensor):
                self.add(local(leaf))
        return results


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


HINTS: dict[str, dict[str, Any]] = {
    "DDP": {"*": sharding.Replicate(), "inputs": sharding.Split(0)},
    "FSDP": {"*": sharding.Split(0)},
    "none": {},
}


def memory_on_ranks(hints: str, share: float) -> tuple[int, int, int]:
    """(peak of live bytes in a step with AdamW, limit, micro-batches). The limit is a share of the memory of a plan
    without a limit."""
    torch.manual_seed(0)
    module, batch = Blocks(), (torch.randn(1024, 96),)
    total_bytes = sharding.plan(module, batch, cores(2), HINTS[hints], mesh={"a": 2}).memory.total
    limit = int(total_bytes * share)
    plan = sharding.plan(module, batch, cores(2, limit), HINTS[hints], mesh={"a": 2})
    applied = sharding.apply(module, plan, sample=batch)
    optimizer = torch.optim.AdamW(applied.parameters(), fused=True)
    del module
    gc.collect()
    live = LiveBytes()
    for tensor in (*applied.parameters(), *batch):
        live.add(local(tensor.detach()))
    with live:
        for _ in range(2):
            applied(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    sharding.close(applied)
    return live.peak, limit, plan.micro_batches


@pytest.mark.slow
@pytest.mark.parametrize(("hints", "share"), [("DDP", 1.07), ("FSDP", 0.75), ("none", 0.75)])
def test_a_step_stays_within_the_memory_limit(ranks: Pools, hints: str, share: float):
    for peak, limit, micro_batches in ranks[2].run(memory_on_ranks, hints, share):
        assert limit / 2 < peak <= limit
        assert (micro_batches > 1) == (share < 1)
