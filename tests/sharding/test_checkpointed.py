"""A user's `torch.utils.checkpoint` is honoured: its function is recomputed in the backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from moe import sharding
from moe.sharding.applied.callable_program import program_of
from moe.sharding.capture.capture import capture
from moe.sharding.operands import RECOMPUTED
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import Built, apply_on_one_device, check_on_ranks, cores
from tests.sharding.test_recompute import kept_bytes


class Layer(nn.Module):
    def __init__(self, dim: int, has_checkpoint: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.has_checkpoint = has_checkpoint

    def feed(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.feed, x, use_reentrant=False) if self.has_checkpoint else self.feed(x))


def each_layer(layers: nn.Sequential, x: Tensor, use_reentrant: bool = False) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=use_reentrant)
    return x


WAYS: dict[str, Callable[[nn.Sequential, Tensor], Tensor]] = {
    "around": each_layer,
    "reentrant": lambda layers, x: each_layer(layers, x, True),
    "sequential": lambda layers, x: checkpoint_sequential(layers, 2, x, use_reentrant=False),
    "nested": lambda layers, x: checkpoint(each_layer, layers, x, use_reentrant=False),
    "not alike": each_layer,
}


class Deep(nn.Module):
    """Layers with checkpoints around them or, for `inside`, within them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.run = WAYS.get(way, lambda layers, x: layers(x))
        self.layers = nn.Sequential(*(Layer(8, way == "inside") for _ in range(4)))
        if way == "not alike":  # without repeated blocks, which are captured once
            self.layers = nn.Sequential(*(nn.Sequential(layer, nn.Identity()) for layer in self.layers))
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.run(self.layers, self.first(x))), y)


def build(way: str) -> Built:
    torch.manual_seed(4)
    x, y = torch.randn(12, 6, 8, dtype=torch.float64), torch.randn(12, 6, 3, dtype=torch.float64)
    return Deep(way).double().eval(), (x, y)


def make_plan(module_and_batch: Built, **options: Any) -> sharding.ShardingPlan:
    return sharding.plan(*module_and_batch, cores(2), mesh={"a": 2}, recompute=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, "inside"])
def test_values_in_checkpoints_are_recomputed_and_not_stored(way: str):
    hints = {"*": sharding.Split(0)}  # one layout for both, as memory depends on it
    plain_plan, checkpoint_plan = make_plan(build(""), hints=hints), make_plan(build(way), hints=hints)
    share = 0.95 if way == "sequential" else 0.6  # its last part is never checkpointed, its first is half
    assert checkpoint_plan.memory.kept < share * plain_plan.memory.kept
    assert kept_bytes(build(way), checkpoint_plan) < share * kept_bytes(build(""), plain_plan)
    assert checkpoint_plan.step_s > plain_plan.step_s
    captured_graph = capture(*build(way))
    program_of(captured_graph, checkpoint_plan)
    assert sum(RECOMPUTED in node.meta for node in captured_graph.graph.graph.nodes) >= 2 * 3


def saved_bytes(way: str) -> int:
    """Bytes that autograd stores in one call of an applied module."""
    module, batch = build(way)
    applied = apply_on_one_device(module, *batch, recompute=False)
    storage_sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage_sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        applied(*batch)
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *applied.parameters(), *batch)}
    return sum(size for pointer, size in storage_sizes.items() if pointer not in weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=pytest.mark.slow) for way in ("around", "inside")), "sequential"]
)
def test_a_call_stores_less(way: str):
    assert saved_bytes(way) < 0.6 * saved_bytes("")


@pytest.mark.slow
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
    check_on_ranks(ranks, partial(build, way), {"a": 2}, steps=2, recompute=recompute, micro_batches=micro_batches)


@pytest.mark.slow
def test_dropout_draws_the_same_numbers_again():
    values = []
    for way in ("", "around"):
        module, batch = build(way)
        applied = apply_on_one_device(module.train(), *batch)
        loss = applied(*batch)
        loss.backward()
        values.append([loss, *(parameter.grad for parameter in applied.parameters())])
    assert all(torch.allclose(*pair, rtol=1e-12, atol=1e-12) for pair in zip(*values, strict=True))


@pytest.mark.slow
def test_graphs_with_and_without_checkpoints_differ():
    checkpoint_digest, plain_digest = (capture(*build(way)).digest for way in ("around", ""))
    assert checkpoint_digest != plain_digest
