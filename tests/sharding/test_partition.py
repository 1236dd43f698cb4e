"""Programs under random assignments compute what one device computes: outputs and every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.sharding.exchange import exchange
from moe.sharding.exchange.exchange import pad_end
from tests.sharding.modules import MeanSquare
from tests.sharding.partitioned import check_at_random, check_function

D = torch.float64


class UnevenMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden_states = torch.relu(self.first(x))
        return ((self.second(hidden_states.view(-1, 10)).view(*x.shape[:-1], 7) - y) ** 2).mean()


def experts(router: Tensor, w_in: Tensor, w_out: Tensor, x: Tensor) -> Tensor:
    """Every token to all experts, weighted."""
    gates = torch.tanh(torch.einsum("GSM,ME->GSE", x, router))
    expert_inputs = torch.einsum("GSE,GSM->EGSM", gates, x)
    hidden_states = torch.relu(torch.einsum("EGSM,EMH->EGSH", expert_inputs, w_in))
    return torch.einsum("EGSH,EHM->GSM", hidden_states, w_out).pow(2).sum()


UNEVEN = (torch.randn(4, 3, 6).double(), torch.randn(4, 3, 7).double())
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("seed", SEEDS)
def test_an_mlp_of_uneven_sizes(seed: int) -> None:
    torch.manual_seed(seed)
    check_at_random(UnevenMLP().double(), UNEVEN, cases=15, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_experts_in_einsum(seed: int) -> None:
    torch.manual_seed(seed)
    inputs = [torch.randn(3, 5, 6, dtype=D)]
    check_function(experts, (6, 4), (4, 6, 5), (4, 5, 6), inputs=inputs, cases=15, seed=seed)


@pytest.mark.slow
def test_three_axes() -> None:
    torch.manual_seed(0)
    check_at_random(UnevenMLP().double(), UNEVEN, cases=4, meshes=[(2, 2, 2), (2, 1, 3)])


class PreActivation(nn.Module):
    """A residual block with an activation in place before its convolution (He et al., arXiv 1603.05027)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.relu, self.conv = nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.relu(self.norm(x)))


class ActivationOfInput(nn.Module):
    """A block that modifies its input."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.conv = nn.ReLU(inplace=True), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.relu(x))


def convolutions(channels_in: int, channels: int) -> list[nn.Module]:
    return [layer for count in (channels_in, channels)
            for layer in (nn.Conv2d(count, channels, 3, padding=1), nn.ReLU(inplace=True))]  # fmt: skip


class UNet(nn.Module):
    """Two levels with a skip connection, of convolutions and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom = nn.Sequential(*convolutions(1, 2)), nn.Sequential(*convolutions(2, 2))
        self.pool, self.up, self.out = (
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(2, 2, 2, 2),
            nn.Sequential(*convolutions(4, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.bottom(self.pool(skip)))], 1))


IN_PLACE: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "perceptron": (lambda: [m for _ in range(2) for m in (nn.Linear(4, 4), nn.ReLU(inplace=True))], (8, 4)),
    "convolutions": (lambda: [*convolutions(1, 2), nn.MaxPool2d(2)], (4, 1, 4, 4)),
    "U-Net": (lambda: [UNet()], (4, 1, 4, 4)),
    "pre-activation": (lambda: [PreActivation() for _ in range(3)], (4, 2, 4, 4)),
    "activation of the input": (
        lambda: [nn.Conv2d(2, 2, 1), *(ActivationOfInput() for _ in range(3))], (4, 2, 3, 3)
    ),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", IN_PLACE)
def test_repeated_layers_may_modify_their_input_in_place(name: str) -> None:
    torch.manual_seed(0)
    build, shape = IN_PLACE[name]
    check_at_random(MeanSquare(*build()).to(D), (torch.randn(shape, dtype=D),), cases=3)


EMPTY: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "contracted": (lambda x: x[:, :0] @ x[:0], (4, 4)),
    "multiplied": (lambda x: x[:0] @ x.t(), (4, 5)),
    "between others": (lambda x: x.softmax(0).flip(2).flatten(1), (5, 0, 3)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EMPTY)
def test_tensors_without_elements(name: str) -> None:
    function, shape = EMPTY[name]
    check_function(lambda x: function(x * 2), shape, cases=12)


def test_conjugates_are_exchanged_as_their_values() -> None:
    check_function(
        lambda z: (2 * z.conj() @ z.mT).imag + (z.conj().imag @ z.real.t()), torch.randn(4, 5, dtype=torch.complex128),
        cases=8,
    )  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.complex128])
def test_memory_viewed_as_another_dtype(dtype: torch.dtype) -> None:
    check_function(lambda x: (x * 2).detach().t().contiguous().view(dtype).abs().sum(1), (6, 4), cases=12)


def test_zeros_keep_their_signs() -> None:
    def copy_signs(x: Tensor) -> Tensor:
        negative_zeros, positive_zeros = (torch.full((5,), zero, dtype=D) for zero in (-0.0, 0.0))
        return torch.copysign(x * 2, negative_zeros) + torch.copysign(x * 4, positive_zeros)

    check_function(copy_signs, (4, 5), cases=2)


def test_whole_numbers_are_not_divided_by_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    # No fake: the product's own padding with zeros again, because conftest pads with 77, which can divide.
    monkeypatch.setattr(exchange, "pad_end", pad_end)

    def divide(numbers: Tensor, divisors: Tensor) -> tuple[Tensor, ...]:
        return numbers // divisors, numbers % divisors, torch.fmod(numbers, divisors)

    def splits_divisors(option: Any) -> bool:
        return option.operands[-1].dim is not None

    inputs = torch.randint(-9, 9, (5, 10, 5)), torch.randint(1, 5, (10, 5))
    check_function(divide, inputs=inputs, cases=4, prefer=splits_divisors, meshes=[(3,), (4,)])


def test_complex_numbers_have_no_maximum() -> None:
    def reduce_parts(x: Tensor) -> tuple[Tensor, ...]:
        parts = torch.ops.aten.split_with_sizes_copy(x * 2, [1, 4])
        return (*(part.abs() for part in parts), x.all(), x.any(), (x * 0).any(1))

    check_function(reduce_parts, torch.randn(5, 5, dtype=torch.complex128), cases=6, meshes=[(3,), (2, 2)])
