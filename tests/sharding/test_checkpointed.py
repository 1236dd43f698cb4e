"""A user's `torch.utils.checkpoint` is honoured: what it calls is computed again in the backward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from moe import sharding
from moe.sharding.applied.callable_program import program_of
from moe.sharding.capture.capture import capture
from moe.sharding.operands import AGAIN
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import Built, cores, differences
from tests.sharding.test_recompute import kept_bytes


class Layer(nn.Module):
    def __init__(self, dim: int, inside: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.inside = inside

    def feed(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.feed, x, use_reentrant=False) if self.inside else self.feed(x))


def plain(layers: nn.Sequential, x: Tensor) -> Tensor:
    return layers(x)


def around(layers: nn.Sequential, x: Tensor) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def reentrant(layers: nn.Sequential, x: Tensor) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def sequential(layers: nn.Sequential, x: Tensor) -> Tensor:
    return checkpoint_sequential(layers, 2, x, use_reentrant=False)


def nested(layers: nn.Sequential, x: Tensor) -> Tensor:
    return checkpoint(around, layers, x, use_reentrant=False)


class Deep(nn.Module):
    def __init__(self, run: Callable[[nn.Sequential, Tensor], Tensor], inside: bool, alike: bool = True) -> None:
        super().__init__()
        self.run = run
        self.layers = nn.Sequential(*(Layer(8, inside) for _ in range(4)))
        if not alike:  # no repeated blocks, which are captured once
            self.layers = nn.Sequential(*(nn.Sequential(each, nn.Identity()) for each in self.layers))
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.run(self.layers, self.first(x))), y)


WAYS: dict[str, tuple[Any, ...]] = {
    "around": (around, False), "reentrant": (reentrant, False), "sequential": (sequential, False),
    "nested": (nested, False), "inside": (plain, True), "not alike": (around, False, False),
}  # fmt: skip


FAST = ("sequential", "reentrant")


def built(way: str) -> Built:
    torch.manual_seed(4)
    x, y = torch.randn(12, 6, 8, dtype=torch.float64), torch.randn(12, 6, 3, dtype=torch.float64)
    return Deep(*WAYS.get(way, (plain, False))).double().eval(), (x, y)


def planned(build: Built, **options: Any) -> sharding.ShardingPlan:
    return sharding.plan(*build, cores(2), mesh={"a": 2}, recompute=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [*FAST, *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way not in FAST)]
)
def test_what_is_checkpointed_is_computed_again_and_not_kept(way: str):
    hints = {"*": sharding.Split(0)}  # one layout for both, as memory depends on it
    without, again = planned(built(""), hints=hints), planned(built(way), hints=hints)
    share = 0.95 if way == "sequential" else 0.6  # its last part is never checkpointed, its first is half
    assert again.memory.kept < share * without.memory.kept
    assert kept_bytes(built(way), again) < share * kept_bytes(built(""), without)
    assert again.step_s > without.step_s
    captured = capture(*built(way))
    program_of(captured, again)
    assert sum(AGAIN in node.meta for node in captured.graph.graph.nodes) >= 2 * 3


def saved_bytes(way: str) -> int:
    """Bytes that autograd keeps from one call of an applied module."""
    module, batch = built(way)
    applied = sharding.apply(module, sharding.plan(module, batch, cores(1), mesh={"a": 1}, recompute=False))
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        applied(*batch)
    weights = {each.untyped_storage().data_ptr() for each in (*module.parameters(), *applied.parameters(), *batch)}
    return sum(size for pointer, size in kept.items() if pointer not in weights)


@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=pytest.mark.slow) for way in ("around", "inside")), "sequential"]
)
def test_a_call_keeps_less_in_memory(way: str):
    assert saved_bytes(way) < 0.6 * saved_bytes("")


def on_ranks(way: str, recompute: bool, micro_batches: int) -> list[str]:
    return differences(lambda: built(way), {"a": 2}, steps=2, recompute=recompute, micro_batches=micro_batches)[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("way", "recompute", "micro_batches"),
    [
        ("around", False, 1),
        ("inside", False, 2),
        ("nested", False, 1),
        ("sequential", True, 1),
        ("not alike", False, 3),
    ],
)
def test_losses_and_gradients_are_those_of_one_device(ranks: Pools, way: str, recompute: bool, micro_batches: int):
    assert ranks[2].run(on_ranks, way, recompute, micro_batches) == [[], []]


@pytest.mark.slow
def test_dropout_draws_again_what_it_drew():
    values = []
    for way in ("", "around"):
        module, batch = built(way)
        applied = sharding.apply(module.train(), sharding.plan(module, batch, cores(1), mesh={"a": 1}), seed=3)
        loss = applied(*batch)
        loss.backward()
        values.append([loss, *(each.grad for each in applied.parameters())])
    assert all(torch.allclose(*pair, rtol=1e-12, atol=1e-12) for pair in zip(*values, strict=True))


def test_plans_of_modules_with_and_without_it_are_told_apart():
    with_it, without = (capture(*built(way)).digest for way in ("around", ""))
    assert with_it != without
