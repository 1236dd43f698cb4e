"""Modules with unusual features equal one device: outputs, gradients and buffers over two steps."""

import copy
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from moe import sharding
from tests.parity.gloo_ranks import Pools
from tests.sharding.modules import Function
from tests.sharding.on_ranks import apply_on_one_device, cores, is_close, unlike

D = torch.float64
Between = Callable[["Odd", Tensor], Any]
Loss = namedtuple("Loss", "loss size")


class Odd(nn.Module):
    """Two layers, with a function between them and one after them."""

    def __init__(self, middle: Between | None = None, end: Between | None = None, **parts: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.middle, self.end = middle, end
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.double()

    def forward(self, x: Tensor) -> Any:
        if x.dtype == torch.int64:
            x = self.table(x).mean(1)
        hidden_states = self.first(x)
        hidden_states = hidden_states if self.middle is None else self.middle(self, hidden_states)
        loss = self.second(hidden_states).square().mean()
        return loss if self.end is None else self.end(self, loss)


class DoubleFunction(torch.autograd.Function):
    """A function whose gradient is not the derivative of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5 + ctx.saved_tensors[0]


class CenteringBlock(nn.Module):
    """A repeated block that reassigns a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor

    def forward(self, h: Tensor) -> Tensor:
        return running_mean(self, torch.tanh(self.linear(h)))


def running_mean(module: Any, h: Tensor) -> Tensor:
    module.mean = 0.9 * module.mean + 0.1 * h.detach().mean(0)
    return h - module.mean


def in_place(module: Odd, h: Tensor) -> Tensor:
    h[:, 0] = 0
    h += 1
    return F.relu(h, inplace=True)


def running(module: Odd, h: Tensor) -> Tensor:
    module.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    module.count += 1
    return h - module.mean


def no_gradient(module: Odd, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs().mean()
    return h / scale


def twice_differentiated(module: Odd, h: Tensor) -> Tensor:
    x = h.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.tanh(module.second(x)).sum(), x, create_graph=True)
    return h + gradient


def autocast(module: Odd, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scale = (module.mean.float() @ module.mean.float()[:, None]).double()
    return h * scale


def profiler_annotation(module: Odd, h: Tensor) -> Tensor:
    with record_function("tanh"):
        return torch.tanh(h)


def tensor_hook(module: Odd, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 2)
    return h * 1


def apply_change(change: Callable[[Odd], Any], module: Odd | None = None) -> Odd:
    module = module or Odd()
    change(module)
    return module


def tie(module: Odd) -> None:
    module.third = nn.Linear(8, 4, dtype=D)
    module.third.weight = module.second.weight


def checkpoint_module(use_reentrant: bool) -> Odd:
    return Odd(lambda module, h: checkpoint(module.inner, h, use_reentrant=use_reentrant), inner=nn.Linear(8, 8))


MODULES: dict[str, Callable[[], Odd]] = {
    "own tensors in place": lambda: Odd(in_place),
    "a tuple": lambda: Odd(end=lambda module, loss: (loss, 3, None, "text", loss * 2)),
    "a dict": lambda: Odd(end=lambda module, loss: {"loss": loss, "more": [loss + 1, {"size": 3}]}),
    "a named tuple": lambda: Odd(end=lambda module, loss: Loss(loss, 3)),
    "one tensor twice": lambda: Odd(end=lambda module, loss: (loss, loss)),
    "its parameters": lambda: Odd(end=lambda module, loss: (loss, module.first.weight, module.second.weight[0])),
    "its buffer": lambda: Odd(end=lambda module, loss: (loss, module.mean), mean=torch.ones(8)),
    "no gradient": lambda: Odd(end=lambda module, loss: (loss, loss.detach(), loss > 0)),
    "unused parameters": lambda: Odd(unused=nn.Linear(3, 3)),
    "parameters with two names": lambda: apply_change(tie, Odd(lambda module, h: h + module.third(h).sum())),
    "frozen parameters": lambda: apply_change(lambda module: module.first.requires_grad_(False)),
    "no trained parameter": lambda: apply_change(lambda module: module.requires_grad_(False)),
    "evaluation": lambda: Odd(
        lambda module, h: F.dropout(module.norm(h), 0.5, module.training), norm=nn.BatchNorm1d(8)).eval(),
    "integers": lambda: Odd(table=nn.Embedding(10, 6)),
    "a parameter without elements": lambda: Odd(
        end=lambda module, loss: loss + module.empty.sum(), empty=nn.Parameter(torch.zeros(0, 3))),
    "complex numbers": lambda: Odd(lambda module, h: torch.fft.fft(h).abs()),
    "a forward hook": lambda: apply_change(
        lambda module: module.first.register_forward_hook(lambda layer, inputs, result: result * 2)),
    "a forward pre-hook": lambda: apply_change(
        lambda module: module.first.register_forward_pre_hook(lambda layer, inputs: (inputs[0] * 2,))),
    "a backward hook": lambda: apply_change(
        lambda module: module.second.register_full_backward_hook(lambda layer, before, after: (before[0] * 3,))),
    "a tensor's hook": lambda: Odd(tensor_hook),
    "weight norm": lambda: apply_change(lambda module: nn.utils.parametrizations.weight_norm(module.first)),
    "spectral norm": lambda: apply_change(lambda module: nn.utils.parametrizations.spectral_norm(module.first)),
    "a checkpoint": lambda: checkpoint_module(False),
    "a reentrant checkpoint": lambda: checkpoint_module(True),
    "vmap": lambda: Odd(lambda module, h: torch.vmap(lambda row: torch.tanh(row) / row.norm())(h)),
    "the gradient of a function": lambda: Odd(
        lambda module, h: h + torch.func.grad(lambda x: torch.tanh(module.second(x)).sum())(h)),
    "a gradient in forward": lambda: Odd(twice_differentiated),
    "an autograd function": lambda: Odd(lambda module, h: DoubleFunction.apply(h)),
    "no_grad in forward": lambda: Odd(no_gradient),
    "autocast": lambda: Odd(autocast, mean=torch.ones(8)),
    "running statistics": lambda: Odd(running, mean=torch.zeros(8), count=torch.tensor(0)),
    "a reassigned buffer": lambda: Odd(running_mean, mean=torch.zeros(8)),
    "batch norm": lambda: Odd(lambda module, h: module.norm(h), norm=nn.BatchNorm1d(8)),
    "blocks with reassigned buffers": lambda: Odd(
        lambda module, h: module.blocks(h), blocks=nn.Sequential(*(CenteringBlock() for _ in range(3)))),
    "a profiler's annotation": lambda: Odd(profiler_annotation),
    "a linear system": lambda: Odd(
        lambda module, h: torch.linalg.solve(h @ h.T + 3 * torch.eye(8, dtype=D), h)),
}  # fmt: skip


def wrong_on_ranks(name: str, is_hinted: bool) -> list[str]:
    """Differences from one device on this rank."""
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(8, 6, dtype=D)
    if name == "integers":
        x = torch.randint(0, 10, (8, 3))
    plan = sharding.plan(module, (x,), cores(2), {"inputs": sharding.Split(0)} if is_hinted else None, mesh={"a": 2})
    reference = copy.deepcopy(module)
    applied = sharding.apply(module, plan)
    wrong = []
    for step in range(2):
        applied.zero_grad()
        reference.zero_grad()
        (actual_leaves, tree), (expected_leaves, expected_tree) = (
            pytree.tree_flatten(model(x)) for model in (applied, reference)
        )
        if tree != expected_tree:
            wrong.append(f"{tree} for {expected_tree}")
        for actual, expected in zip(actual_leaves, expected_leaves, strict=True):
            is_equal = is_close(actual, expected) if isinstance(expected, Tensor) else actual == expected
            if not is_equal or getattr(actual, "requires_grad", False) != getattr(expected, "requires_grad", False):
                wrong.append(f"step {step} returns {actual} for {expected}")
        for leaves in (actual_leaves, expected_leaves):
            sums = [leaf.sum() for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            if sums:
                torch.stack(sums).sum().backward()
        wrong += [f"{difference} in step {step}" for difference in unlike(applied, reference)]
    sharding.close(applied)
    return wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODULES)
def test_it_equals_one_device(ranks: Pools, name: str) -> None:
    for is_hinted in (False, True):
        assert ranks[2].run(wrong_on_ranks, name, is_hinted) == [[], []]


def test_a_checkpoint_draws_its_numbers_once() -> None:
    """Dropout, linear in its parameter, within a part that one device would compute again."""
    module = Function(
        lambda w, x: checkpoint(lambda w: F.dropout(w * x, 0.5), w, use_reentrant=False).sum(), torch.randn(50, dtype=D)
    )
    x = torch.randn(50, dtype=D)
    applied = apply_on_one_device(module, x)
    loss = applied(x)
    loss.backward()
    gradient = applied.get_parameter("operands.0").grad
    assert 0 < int((gradient == 0).sum()) < 50
    assert torch.allclose((gradient * module.operands[0]).sum(), loss, rtol=1e-12)
