"""Evaluation of what was planned in training: in the memory that there is, and without what a backward pass needs."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe import sharding
from moe.sharding.applied.dtensors import local
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import cores


class Wide(nn.Module):
    """Its activations are larger than its parameters."""

    def __init__(self, predicts: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.predicts = predicts

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if self.predicts and not self.training else x.square().mean()


class Seen(TorchDispatchMode):
    """Tensors that a run makes: rows of the largest, and how many there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_rows, self.at_once = 0, 0
        self._there: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)]
        if isinstance(made, Tensor) and made.dim() == 2 and made.untyped_storage().data_ptr() not in given:
            self.num_rows = max(self.num_rows, made.shape[0])
            self._there = [each for each in self._there if each() is not None] + [weakref.ref(made)]
            self.at_once = max(self.at_once, len(self._there))
        return made


X = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))


def tight(module: nn.Module, num_ranks: int = 1) -> tuple[sharding.Applied, int]:
    """Applied with half of the memory that it would take at once; its number of micro-batches."""
    whole = sharding.plan(module, (X,), cores(num_ranks), recompute=False)
    plan = sharding.plan(module, (X,), cores(num_ranks, whole.memory.total // 2), recompute=False)
    return sharding.apply(module, plan), plan.micro_batches


@pytest.mark.sample(1)
@pytest.mark.parametrize("enabled", [False, True], ids=["evaluated", "with gradients"])
def test_evaluation_takes_no_more_memory_than_there_is(enabled: bool):
    module = Wide()
    applied, micro_batches = tight(copy.deepcopy(module))
    assert micro_batches > 1
    applied.eval()
    applied(X)
    with Seen() as seen, torch.set_grad_enabled(enabled):
        found = applied(X)
    assert torch.allclose(found, module.eval()(X))
    assert seen.num_rows == len(X) // micro_batches


def on_ranks() -> list[bool]:
    module = Wide()
    for each in module.parameters():
        nn.init.normal_(each, std=0.3, generator=torch.Generator().manual_seed(each.numel()))
    applied, micro_batches = tight(copy.deepcopy(module), 2)
    found, expected = applied.eval()(X), module.eval()(X)
    found.backward()
    expected.backward()
    alike = []
    for name, of in applied.shards().items():
        cut = tuple(slice(at, at + size) for at, size in zip(of.offsets, of.part.shape, strict=True))
        whole = module.get_parameter(name).grad
        alike.append(torch.allclose(local(applied.get_parameter(name).grad), whole[cut], atol=1e-6))
    sharding.close(applied)
    return [micro_batches > 1, torch.allclose(found, expected), *alike]


@pytest.mark.slow
def test_evaluation_in_micro_batches_on_ranks(ranks: Pools):
    assert ranks[2].run(on_ranks) == [[True] * 18] * 2


def test_evaluation_that_gives_rows_has_the_whole_batch_at_once():
    module = Wide(predicts=True)
    applied, micro_batches = tight(copy.deepcopy(module))
    assert micro_batches > 1
    assert torch.allclose(applied.eval()(X), module.eval()(X), atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_kept_where_no_gradient_is_asked_for(training: bool):
    module = Wide()
    applied = sharding.apply(module, sharding.plan(module, (X,), cores(1))).train(training)
    counts = []
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            applied(X)
            with Seen() as seen:
                found = applied(X)
        assert torch.allclose(found, module(X))
        counts.append(seen.at_once)
    assert counts[0] >= 2 * counts[1]
