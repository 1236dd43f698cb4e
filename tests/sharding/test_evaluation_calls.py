"""Evaluation of modules planned in training: within the memory limit, and without values for a backward pass."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe import sharding
from tests.parity.gloo_ranks import Pools
from tests.sharding.modules import Stack
from tests.sharding.on_ranks import cores, unlike


class PredictingStack(Stack):
    """In evaluation, it returns rows instead of a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.hidden_states(x)


class TensorRecorder(TorchDispatchMode):
    """Tensors that a run creates: rows of the largest tensor, and the maximum number of live tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num_rows, self.at_once = 0, 0
        self._live: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        pointers = [argument.untyped_storage().data_ptr() for argument in args if isinstance(argument, Tensor)]
        if isinstance(result, Tensor) and result.dim() == 2 and result.untyped_storage().data_ptr() not in pointers:
            self.num_rows = max(self.num_rows, result.shape[0])
            self._live = [reference for reference in self._live if reference() is not None] + [weakref.ref(result)]
            self.at_once = max(self.at_once, len(self._live))
        return result


X = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))


def tight(module: nn.Module, num_ranks: int = 1) -> tuple[sharding.Applied, int]:
    """(module applied with half of the memory that one pass takes, its number of micro-batches)"""
    unlimited_plan = sharding.plan(module, (X,), cores(num_ranks), recompute=False)
    plan = sharding.plan(module, (X,), cores(num_ranks, unlimited_plan.memory.total // 2), recompute=False)
    return sharding.apply(module, plan), plan.micro_batches


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("has_gradients", [False, True], ids=["evaluated", "with gradients"])
def test_evaluation_stays_within_the_memory_limit(has_gradients: bool):
    module = Stack()
    applied, micro_batches = tight(copy.deepcopy(module))
    assert micro_batches > 1
    applied.eval()
    applied(X)
    with TensorRecorder() as recorder, torch.set_grad_enabled(has_gradients):
        actual = applied(X)
    assert torch.allclose(actual, module.eval()(X))
    assert recorder.num_rows == len(X) // micro_batches


def on_ranks() -> list[bool]:
    module = Stack()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    applied, micro_batches = tight(copy.deepcopy(module), 2)
    actual, expected = applied.eval()(X), module.eval()(X)
    actual.backward()
    expected.backward()
    wrong = unlike(applied, module, ("gradient",), 1e-5)
    sharding.close(applied)
    return [micro_batches > 1, torch.allclose(actual, expected), not wrong]


@pytest.mark.slow
def test_evaluation_in_micro_batches_on_ranks(ranks: Pools):
    assert ranks[2].run(on_ranks) == [[True] * 3] * 2


@pytest.mark.slow
def test_evaluation_that_returns_rows_takes_the_whole_batch():
    module = PredictingStack()
    applied, micro_batches = tight(copy.deepcopy(module))
    assert micro_batches > 1
    assert torch.allclose(applied.eval()(X), module.eval()(X), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_no_values_are_stored_without_gradients(training: bool):
    module = Stack()
    applied = sharding.apply(module, sharding.plan(module, (X,), cores(1))).train(training)
    counts = []
    for has_gradients in (True, False):
        with torch.set_grad_enabled(has_gradients):
            applied(X)
            with TensorRecorder() as recorder:
                actual = applied(X)
        assert torch.allclose(actual, module(X))
        counts.append(recorder.at_once)
    assert counts[0] >= 2 * counts[1]
