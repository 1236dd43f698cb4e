"""Modules with what people write now and then equal one device: outputs, gradients, buffers, over two steps."""

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
from moe.sharding.applied.dtensors import local
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import cores

D = torch.float64
Between = Callable[["Odd", Tensor], Any]
Loss = namedtuple("Loss", "loss size")


class Odd(nn.Module):
    """Two layers, between which, and behind which, something is done."""

    def __init__(self, between: Between | None = None, end: Between | None = None, **parts: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.between, self.end = between, end
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.double()

    def forward(self, x: Tensor) -> Any:
        if x.dtype == torch.int64:
            x = self.table(x).mean(1)
        hidden = self.first(x)
        hidden = hidden if self.between is None else self.between(self, hidden)
        loss = self.second(hidden).square().mean()
        return loss if self.end is None else self.end(self, loss)


class Doubled(torch.autograd.Function):
    """Its gradient is not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5 + ctx.saved_tensors[0]


def in_place(module: Odd, h: Tensor) -> Tensor:
    h[:, 0] = 0
    h += 1
    return F.relu(h, inplace=True)


def running(module: Odd, h: Tensor) -> Tensor:
    module.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    module.count += 1
    return h - module.mean


def set_anew(module: Odd, h: Tensor) -> Tensor:
    module.mean = 0.9 * module.mean + 0.1 * h.detach().mean(0)
    return h - module.mean


def no_gradient(module: Odd, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs().mean()
    return h / scale


def twice_differentiated(module: Odd, h: Tensor) -> Tensor:
    x = h.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.tanh(module.second(x)).sum(), x, create_graph=True)
    return h + gradient


def gradient_of_a_function(module: Odd, h: Tensor) -> Tensor:
    return h + torch.func.grad(lambda x: torch.tanh(module.second(x)).sum())(h)


def narrower(module: Odd, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scale = (module.mean.float() @ module.mean.float()[:, None]).double()
    return h * scale


def profiled(module: Odd, h: Tensor) -> Tensor:
    with record_function("tanh"):
        return torch.tanh(h)


def solved(module: Odd, h: Tensor) -> Tensor:
    return torch.linalg.solve(h @ h.T + 3 * torch.eye(8, dtype=D), h)


def tensor_hook(module: Odd, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 2)
    return h * 1


def changed(module: Odd, *changes: Callable[[Odd], Any]) -> Odd:
    for change in changes:
        change(module)
    return module


def tied(module: Odd) -> None:
    module.third = nn.Linear(8, 4, dtype=D)
    module.third.weight = module.second.weight


MODULES: dict[str, Callable[[], Odd]] = {
    "in place on what it has made": lambda: Odd(in_place),
    "a tuple": lambda: Odd(end=lambda module, loss: (loss, 3, None, "said", loss * 2)),
    "a dict": lambda: Odd(end=lambda module, loss: {"loss": loss, "more": [loss + 1, {"size": 3}]}),
    "a named tuple": lambda: Odd(end=lambda module, loss: Loss(loss, 3)),
    "one tensor twice": lambda: Odd(end=lambda module, loss: (loss, loss)),
    "its parameters": lambda: Odd(end=lambda module, loss: (loss, module.first.weight, module.second.weight[0])),
    "its buffer": lambda: Odd(end=lambda module, loss: (loss, module.mean), mean=torch.ones(8)),
    "no gradient": lambda: Odd(end=lambda module, loss: (loss, loss.detach(), loss > 0)),
    "unused parameters": lambda: Odd(unused=nn.Linear(3, 3)),
    "parameters under two names": lambda: changed(Odd(lambda module, h: h + module.third(h).sum()), tied),
    "frozen parameters": lambda: changed(Odd(), lambda module: module.first.requires_grad_(False)),
    "nothing to train": lambda: changed(Odd(), lambda module: module.requires_grad_(False)),
    "evaluation": lambda: Odd(
        lambda module, h: F.dropout(module.norm(h), 0.5, module.training), norm=nn.BatchNorm1d(8)).eval(),
    "integers alone": lambda: Odd(table=nn.Embedding(10, 6)),
    "a parameter without elements": lambda: Odd(end=lambda module, loss: loss + module.none.sum(),
                                                none=nn.Parameter(torch.zeros(0, 3))),
    "complex numbers": lambda: Odd(lambda module, h: torch.fft.fft(h).abs()),
    "a forward hook": lambda: changed(
        Odd(), lambda module: module.first.register_forward_hook(lambda one, given, made: made * 2)),
    "a hook before": lambda: changed(
        Odd(), lambda module: module.first.register_forward_pre_hook(lambda one, given: (given[0] * 2,))),
    "a backward hook": lambda: changed(
        Odd(), lambda module: module.second.register_full_backward_hook(lambda one, before, after: (before[0] * 3,))),
    "a tensor's hook": lambda: Odd(tensor_hook),
    "weight norm": lambda: changed(Odd(), lambda module: nn.utils.parametrizations.weight_norm(module.first)),
    "spectral norm": lambda: changed(Odd(), lambda module: nn.utils.parametrizations.spectral_norm(module.first)),
    "a checkpoint": lambda: Odd(
        lambda module, h: checkpoint(module.inner, h, use_reentrant=False), inner=nn.Linear(8, 8)),
    "a reentrant checkpoint": lambda: Odd(
        lambda module, h: checkpoint(module.inner, h, use_reentrant=True), inner=nn.Linear(8, 8)),
    "vmap": lambda: Odd(lambda module, h: torch.vmap(lambda row: torch.tanh(row) / row.norm())(h)),
    "the gradient of a function": lambda: Odd(gradient_of_a_function),
    "a gradient within": lambda: Odd(twice_differentiated),
    "a function of autograd": lambda: Odd(lambda module, h: Doubled.apply(h)),
    "without gradients within": lambda: Odd(no_gradient),
    "autocast": lambda: Odd(narrower, mean=torch.ones(8)),
    "running statistics": lambda: Odd(running, mean=torch.zeros(8), count=torch.tensor(0)),
    "a buffer set anew": lambda: Odd(set_anew, mean=torch.zeros(8)),
    "batch norm": lambda: Odd(lambda module, h: module.norm(h), norm=nn.BatchNorm1d(8)),
    "blocks with buffers set anew": lambda: Odd(
        lambda module, h: module.blocks(h), blocks=nn.Sequential(*(Centred() for _ in range(3)))),
    "a profiler's notes": lambda: Odd(profiled),
    "a solved system": lambda: Odd(solved),
}  # fmt: skip


class Centred(nn.Module):
    """A block that repeats, whose buffer is set anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor

    def forward(self, h: Tensor) -> Tensor:
        h = torch.tanh(self.linear(h))
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


def wrong_on_ranks(name: str, hinted: bool) -> list[str]:
    """What is not as on one device, on this rank."""
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(8, 6, dtype=D)
    if name == "integers alone":
        x = torch.randint(0, 10, (8, 3))
    plan = sharding.plan(module, (x,), cores(2), {"inputs": sharding.Split(0)} if hinted else None, mesh={"a": 2})
    alone = copy.deepcopy(module)
    applied = sharding.apply(module, plan)
    wrong = []
    for step in range(2):
        applied.zero_grad()
        alone.zero_grad()
        found, expected = (pytree.tree_flatten(each(x)) for each in (applied, alone))
        if found[1] != expected[1]:
            wrong.append(f"{found[1]} for {expected[1]}")
        for mine, theirs in zip(found[0], expected[0], strict=True):
            is_equal = alike(mine, theirs) if isinstance(theirs, Tensor) else mine == theirs
            if not is_equal or getattr(mine, "requires_grad", False) != getattr(theirs, "requires_grad", False):
                wrong.append(f"step {step} returns {mine} for {theirs}")
        for returned in (found[0], expected[0]):
            trained = [each.sum() for each in returned if isinstance(each, Tensor) and each.requires_grad]
            if trained:
                torch.stack(trained).sum().backward()
        parameters, buffers = dict(alone.named_parameters()), dict(alone.named_buffers())
        for label, whole in parameters.items():
            mine, theirs = applied.get_parameter(label).grad, whole.grad
            mine = None if mine is None else local(mine)
            if mine is not None and theirs is not None:
                wrong += difference(applied, label, mine, theirs, f"gradient in step {step}")
            elif any(each is not None and each.any() for each in (mine, theirs)):
                wrong.append(f"gradient of {label} in step {step} is {mine} for {theirs}")
        for label, whole in (parameters | buffers).items():
            wrong += difference(applied, label, applied.shards()[label].part, whole, f"value in step {step}")
    sharding.close(applied)
    return wrong


def difference(applied: Any, label: str, part: Tensor, whole: Tensor, what: str) -> list[str]:
    shard = applied.shard_of(label, part)
    cut = tuple(slice(at, at + size) for at, size in zip(shard.offsets, part.shape, strict=True))
    return [] if alike(part, whole[cut]) else [f"{what} of {label}: {part} for {whole[cut]}"]


def alike(found: Tensor, expected: Tensor) -> bool:
    return (
        found.shape == expected.shape
        and found.dtype == expected.dtype
        and torch.allclose(found.double(), expected.double(), rtol=1e-10, atol=1e-10)
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODULES)
def test_it_equals_one_device(ranks: Pools, name: str) -> None:
    for hinted in (False, True):
        assert ranks[2].run(wrong_on_ranks, name, hinted) == [[], []]


class Dropped(nn.Module):
    """Linear in its parameter, with dropout in a part that one device would compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(50, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda w: F.dropout(w * x, 0.5), self.w, use_reentrant=False).sum()


def test_what_a_checkpoint_draws_is_drawn_once() -> None:
    module, x = Dropped(), torch.randn(50, dtype=D)
    applied = sharding.apply(module, sharding.plan(module, (x,), cores(1)))
    loss = applied(x)
    loss.backward()
    gradient = applied.get_parameter("w").grad
    assert 0 < int((gradient == 0).sum()) < 50
    assert torch.allclose((gradient * module.w).sum(), loss, rtol=1e-12)
