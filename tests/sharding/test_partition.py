"""Programs under random assignments compute what one device computes: outputs and every gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moe.sharding.exchange import exchange
from moe.sharding.exchange.exchange import pad_end
from moe.sharding.rules.rule import AxisOption
from tests.sharding.partitioned import check_at_random

D = torch.float64


class UnevenMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return ((self.second(hidden.view(-1, 10)).view(*x.shape[:-1], 7) - y) ** 2).mean()


class EinsumExperts(nn.Module):
    """Every token to all experts, weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(6, 4))
        self.w_in, self.w_out = nn.Parameter(torch.randn(4, 6, 5)), nn.Parameter(torch.randn(4, 5, 6))

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.tanh(torch.einsum("GSM,ME->GSE", x, self.router))
        dispatched = torch.einsum("GSE,GSM->EGSM", gates, x)
        hidden = torch.relu(torch.einsum("EGSM,EMH->EGSH", dispatched, self.w_in))
        return torch.einsum("EGSH,EHM->GSM", hidden, self.w_out).pow(2).sum()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_mlp_of_uneven_sizes(seed):
    torch.manual_seed(seed)
    sample = (torch.randn(4, 3, 6).double(), torch.randn(4, 3, 7).double())
    check_at_random(UnevenMLP().double(), sample, cases=15, seed=seed)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_experts_in_einsum(seed):
    torch.manual_seed(seed)
    check_at_random(EinsumExperts().double(), (torch.randn(3, 5, 6).double(),), cases=15, seed=seed)


def test_three_axes():
    torch.manual_seed(0)
    sample = (torch.randn(4, 3, 6).double(), torch.randn(4, 3, 7).double())
    check_at_random(UnevenMLP().double(), sample, cases=4, meshes=[(2, 2, 2), (2, 1, 3)])


class Of(nn.Module):
    """A function of one parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor], value: Tensor) -> None:
        super().__init__()
        self.function, self.value = function, nn.Parameter(value)

    def forward(self) -> Tensor:
        return self.function(self.value * 2)


EMPTY: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "contracted": (lambda x: x[:, :0] @ x[:0], (4, 4)),
    "multiplied": (lambda x: x[:0] @ x.t(), (4, 5)),
    "between others": (lambda x: x.softmax(0).flip(2).flatten(1), (5, 0, 3)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", EMPTY)
def test_tensors_without_elements(name: str) -> None:
    function, shape = EMPTY[name]
    check_at_random(Of(function, torch.randn(shape, dtype=D)), (), cases=12)


def test_conjugates_are_exchanged_as_they_are() -> None:
    module = Of(
        lambda z: (z.conj() @ z.mT).imag + (z.conj().imag @ z.real.t()), torch.randn(4, 5, dtype=torch.complex128)
    )
    check_at_random(module, (), cases=8)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.complex128])
def test_the_same_memory_as_another_dtype(dtype: torch.dtype) -> None:
    check_at_random(
        Of(lambda x: x.detach().t().contiguous().view(dtype).abs().sum(1), torch.randn(6, 4, dtype=D)), (), cases=12
    )


def test_zeros_of_both_signs_are_two() -> None:
    def signed(x: Tensor) -> Tensor:
        below, above = (torch.full((5,), zero, dtype=D) for zero in (-0.0, 0.0))
        return torch.copysign(x, below) + torch.copysign(x * 2, above)

    check_at_random(Of(signed, torch.randn(4, 5, dtype=D)), (), cases=2)


class Divided(nn.Module):
    def forward(self, whole: Tensor, divisors: Tensor) -> tuple[Tensor, ...]:
        return whole // divisors, whole % divisors, torch.fmod(whole, divisors)


def test_whole_numbers_are_not_divided_by_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is faked: the product's own padding again, zeros. By the 77 that conftest pads with one may divide.
    monkeypatch.setattr(exchange, "pad_end", pad_end)
    sample = torch.randint(-9, 9, (5, 10, 5)), torch.randint(1, 5, (10, 5))

    def splits_divisors(option: AxisOption) -> bool:
        return option.operands[-1].dim is not None

    check_at_random(Divided(), sample, cases=4, prefer=splits_divisors, meshes=[(3,), (4,)])


def test_complex_numbers_have_no_largest() -> None:
    def reduced(x: Tensor) -> tuple[Tensor, ...]:
        parts = torch.ops.aten.split_with_sizes_copy(x, [1, 4])
        return (*(each.abs() for each in parts), x.all(), x.any(), (x * 0).any(1))

    module = Of(reduced, torch.randn(5, 5, dtype=torch.complex128))
    check_at_random(module, (), cases=6, meshes=[(3,), (2, 2)])
