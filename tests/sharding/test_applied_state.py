"""State, results and gradients of calls of an applied module: those of the plain module, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from moe.sharding.exchange.mesh import OneDevice
from tests.sharding.modules import MeanSquare
from tests.sharding.on_ranks import apply_on_one_device, cores

X = torch.arange(6.0).reshape(2, 3)


class Buffers(nn.Module):
    """A weight and two buffers that a function updates; `alias` is another name of `first`."""

    first: Tensor
    second: Tensor

    def __init__(self, run: Callable[["Buffers", Tensor], Any]) -> None:
        super().__init__()
        self.run, self.weight = run, nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("first", torch.ones(3))
        self.register_buffer("second", torch.zeros(3))
        self.register_buffer("alias", self.first)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def in_place(module: Buffers, x: Tensor) -> Tensor:
    """Gradients need the buffer's values before the update."""
    y = (x * module.weight * module.first.clone()).square().sum()
    with torch.no_grad():
        module.first.mul_(0.5).add_(x.mean(0))
    return y


def swap_buffers(module: Buffers, x: Tensor) -> Tensor:
    module.first, module.second = module.second.clone(), module.first.clone()
    return (x * module.weight * module.first).sum()


def return_buffers(module: Buffers, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers are returned as they were before they are reassigned."""
    before, rows = module.first, module.second[:2]
    module.first, module.second = module.first + x.mean(0), x[1]
    return (x * module.weight * module.first).sum(), before, rows


@pytest.mark.slow
def test_a_buffer_with_two_names_is_one_tensor_that_calls_update():
    plain = Buffers(in_place)
    applied = apply_on_one_device(Buffers(in_place), X)
    buffer = applied.get_buffer("first")
    for _ in range(3):
        for model in (plain, applied):
            model(X).backward()
    assert torch.equal(applied.get_parameter("weight").grad, plain.weight.grad)
    assert torch.equal(buffer, plain.first)
    for name in ("first", "alias"):
        assert applied.get_buffer(name) is buffer
        assert torch.equal(sharding.state_dict(applied)[name], plain.first)


@pytest.mark.parametrize("run", [swap_buffers, return_buffers])
def test_buffers_are_reassigned_as_on_one_device(run: Callable[[Buffers, Tensor], Any]):
    plain, module = Buffers(run), Buffers(run)
    for model in (plain, module):
        del model.alias  # two names of a reassigned buffer would be two buffers
    applied = apply_on_one_device(module, X)
    for _ in range(3):
        results = [torch.utils._pytree.tree_leaves(model(X)) for model in (applied, plain)]
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        for name, buffer in plain.named_buffers():
            assert torch.equal(applied.get_buffer(name), buffer)


class TiedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).square().sum()


def test_all_names_of_a_tied_parameter_have_one_placement():
    plan = sharding.plan(TiedLayers(), (X,), cores(2), {"first.weight": sharding.Split(0)}, mesh={"devices": 2})
    applied = sharding.apply(TiedLayers(), plan, OneDevice((2,), (1,)), sample=(X,))
    first, second = (applied.shards()[f"{name}.weight"] for name in ("first", "second"))
    assert first.offsets == second.offsets == (2, 0)
    assert first.part is second.part or torch.equal(first.part, second.part)
    assert applied.placements_of("first.weight") == applied.placements_of("second.weight")


class StopGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, tangent: Tensor) -> None:
        return None


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_second_derivatives_are_refused_and_a_loss_without_a_gradient_leaves_none(micro_batches: int):
    applied = apply_on_one_device(MeanSquare(nn.Linear(3, 1)), X, micro_batches=micro_batches)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(applied(X), [*applied.parameters()], create_graph=True)
    StopGradient.apply(applied(X)).backward()
    assert [parameter.grad for parameter in applied.parameters()] == [None, None]


def test_evaluation_without_gradients_may_come_first():
    module = MeanSquare(nn.Linear(3, 1), nn.Dropout(0.5))
    applied = apply_on_one_device(copy.deepcopy(module), X)
    applied.eval()
    with torch.no_grad():
        applied(X)
    applied(X).backward()
    module.eval()(X).backward()
    assert torch.allclose(applied.get_parameter("layers.0.weight").grad, module.layers[0].weight.grad)


@pytest.mark.slow
def test_a_plan_does_not_depend_on_the_gradient_mode():
    module = MeanSquare(nn.Linear(3, 1))
    digest = sharding.plan(module, (X,), cores(1), mesh={"devices": 1}).digest
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert sharding.plan(module, (X,), cores(1), mesh={"devices": 1}).digest == digest


class CompiledActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.activation = torch.compile(lambda x: x.sin() * 2, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x)).square().sum()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # within torch's compiler
def test_forward_may_call_a_compiled_function():
    module = CompiledActivation()
    cold = apply_on_one_device(module, X)(X)
    expected = module(X)  # compiles it
    assert torch.allclose(cold, expected)
    assert torch.allclose(apply_on_one_device(module, X)(X), expected)


def test_each_training_call_draws_new_numbers():
    applied = apply_on_one_device(MeanSquare(nn.Linear(3, 64), nn.Dropout(0.5)), X)
    with torch.no_grad():
        assert applied(X) != applied(X)
    assert applied.draws.step == 2
    applied.eval()
    assert applied(X) == applied(X)
    assert applied.draws.step == 2


class Two(nn.Module):
    """Two results with shared and separate parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.p, self.q = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.both(x).tanh()
        return {"p": self.p(x).square().sum(), "q": self.q(x).square().mean(0)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("weights", [{"p": 1.0}, {"q": 1.0}, {"p": 2.0, "q": 1.0}, {"p": 0.0}], ids=str)
def test_parameters_outside_the_loss_have_no_gradient(weights: dict[str, float]):
    module = Two()
    applied = apply_on_one_device(copy.deepcopy(module), X)
    for model in (module, applied):
        y = model(X)
        torch.stack([(weight * y[name]).sum() for name, weight in weights.items()]).sum().backward()
    for name, parameter in module.named_parameters():
        gradient = applied.get_parameter(name).grad
        assert (gradient is None) == (parameter.grad is None), name
        assert gradient is None or torch.allclose(gradient, parameter.grad), name
