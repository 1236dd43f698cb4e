"""What calls of an applied module leave behind, and what of them is differentiated: as the plain module, or refused."""

import copy

import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from moe.sharding.exchange.mesh import OneDevice
from tests.sharding.on_ranks import cores


def applied_to(module: nn.Module, *sample: Tensor, **options: int) -> sharding.Applied:
    plan = sharding.plan(module, sample, cores(1), mesh={"devices": 1}, **options)
    return sharding.apply(module, plan, sample=sample)


class Follows(nn.Module):
    """A buffer under two names follows what is seen; gradients need what it was."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("seen", torch.ones(3))
        self.register_buffer("again", self.seen)

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.weight * self.seen.clone()).square().sum()
        with torch.no_grad():
            self.seen.mul_(0.5).add_(x.mean(0))
        return y


X = torch.arange(6.0).reshape(2, 3)


def test_a_buffer_under_two_names_is_one_tensor_that_calls_write_into():
    plain, module = Follows(), Follows()
    applied = applied_to(module, X)
    held = applied.get_buffer("seen")
    for _ in range(3):
        for each in (plain, applied):
            each(X).backward()
    assert torch.equal(applied.get_parameter("weight").grad, plain.weight.grad)
    assert torch.equal(held, plain.seen)
    for name in ("seen", "again"):
        assert applied.get_buffer(name) is held
        assert torch.equal(sharding.state_dict(applied)[name], plain.seen)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).square().sum()


def test_all_names_of_a_tied_parameter_lie_alike():
    plan = sharding.plan(Tied(), (X,), cores(2), {"first.weight": sharding.Split(0)}, mesh={"devices": 2})
    applied = sharding.apply(Tied(), plan, OneDevice((2,), (1,)), sample=(X,))
    first, second = (applied.shards()[f"{name}.weight"] for name in ("first", "second"))
    assert first.offsets == second.offsets == (2, 0)
    assert first.part is second.part or torch.equal(first.part, second.part)
    assert applied.placements_of("first.weight") == applied.placements_of("second.weight")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_gradient_is_not_differentiated(micro_batches: int):
    applied = applied_to(nn.Sequential(nn.Linear(3, 1), Summed()), X, micro_batches=micro_batches)
    with pytest.raises(RuntimeError, match="create_graph=True asks for gradients of gradients"):
        torch.autograd.grad(applied(X), [*applied.parameters()], create_graph=True)


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum()


def test_evaluation_without_gradients_first():
    module = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5), Summed())
    applied = applied_to(copy.deepcopy(module), X)
    applied.eval()
    with torch.no_grad():
        applied(X)
    loss = applied(X)
    loss.backward()
    module.eval()(X).backward()
    assert torch.allclose(applied.get_parameter("0.weight").grad, module[0].weight.grad)


def test_planned_without_gradients():
    module = nn.Sequential(nn.Linear(3, 1), Summed())
    digest = sharding.plan(module, (X,), cores(1), mesh={"devices": 1}).digest
    for within in (torch.no_grad(), torch.inference_mode()):
        with within:
            assert sharding.plan(module, (X,), cores(1), mesh={"devices": 1}).digest == digest


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.activation = torch.compile(lambda x: x.sin() * 2, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x)).square().sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # within torch's compiler
def test_a_function_that_is_compiled_within_forward():
    module = Compiled()
    cold = applied_to(module, X)(X)
    expected = module(X)  # compiles it
    warm = applied_to(module, X)(X)
    assert torch.allclose(cold, expected)
    assert torch.allclose(warm, expected)


def test_each_call_in_training_draws_anew():
    applied = applied_to(nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), Summed()), X)
    with torch.no_grad():
        assert applied(X) != applied(X)
    assert applied.draws.step == 2
    applied.eval()
    assert applied(X) == applied(X)
    assert applied.draws.step == 2


class Exchanges(nn.Module):
    """Two buffers change places."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("one", torch.ones(3))
        self.register_buffer("other", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.one, self.other = self.other.clone(), self.one.clone()
        return (x * self.weight * self.one).sum()


def test_buffers_that_change_places():
    plain, module = Exchanges(), Exchanges()
    applied = applied_to(module, X)
    for _ in range(3):
        assert applied(X).item() == plain(X).item()
        for name, buffer in plain.named_buffers():
            assert torch.equal(applied.get_buffer(name), buffer)
