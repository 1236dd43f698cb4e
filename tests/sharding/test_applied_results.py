"""What an applied module returns, and gradients of it: as the plain module's."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.sharding.test_applied_state import Summed, X, applied_to


class Earlier(nn.Module):
    """It returns what was in buffers before it set them anew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before, rows = self.seen, self.last[:2]
        self.seen, self.last = self.seen + x.mean(0), x[1]
        return (x * self.weight * self.seen).sum(), before, rows


def test_a_buffer_that_is_returned_is_as_it_was_when_it_is_set_anew():
    plain, applied = Earlier(), applied_to(Earlier(), X)
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(applied(X), plain(X), strict=True))
        for name, buffer in plain.named_buffers():
            assert torch.equal(applied.get_buffer(name), buffer)


class Two(nn.Module):
    """Two results, of some parameters together and of others each for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.p, self.q = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.both(x).tanh()
        return {"p": self.p(x).square().sum(), "q": self.q(x).square().mean(0)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("weights", [{"p": 1.0}, {"q": 1.0}, {"p": 2.0, "q": 1.0}, {"p": 0.0}], ids=str)
def test_parameters_of_what_the_loss_leaves_out_have_no_gradient(weights: dict[str, float]):
    module = Two()
    applied = applied_to(copy.deepcopy(module), X)
    for each in (module, applied):
        y = each(X)
        torch.stack([(weight * y[name]).sum() for name, weight in weights.items()]).sum().backward()
    for name, parameter in module.named_parameters():
        found = applied.get_parameter(name).grad
        assert (found is None) == (parameter.grad is None), name
        assert found is None or torch.allclose(found, parameter.grad), name


class Halted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, tangent: Tensor) -> None:
        return None


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_that_is_given_no_gradient_leaves_none(micro_batches: int):
    applied = applied_to(nn.Sequential(nn.Linear(3, 1), Summed()), X, micro_batches=micro_batches)
    Halted.apply(applied(X)).backward()
    assert [each.grad for each in applied.parameters()] == [None, None]
