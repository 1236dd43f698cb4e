"""Layers that change their input in place, as `nn.ReLU(inplace=True)` does, alike or repeated, compute what one device
computes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.sharding.partitioned import check_at_random

D = torch.float64


class PreActivation(nn.Module):
    """A residual block whose activation comes first and is in place (He et al., arXiv 1603.05027)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.relu(self.norm(x)))


class ActivationOfInput(nn.Module):
    """A block that changes what it is called with."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.relu, self.conv = nn.ReLU(inplace=True), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.relu(x))


class UNet(nn.Module):
    """Two levels with skips, each of a convolution and an activation in place, twice."""

    def __init__(self, channels: int = 2) -> None:
        super().__init__()
        self.down, self.bottom = _twice(1, channels), _twice(channels, channels)
        self.pool, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(channels, channels, 2, 2)
        self.out = _twice(2 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.bottom(self.pool(skip)))], 1))


def _twice(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(inplace=True),
    )  # fmt: skip


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)
    )


def vgg() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(inplace=True),
        nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    )  # fmt: skip


class Loss(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().sum()


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (8, 4)),
    "VGG": (vgg, (4, 1, 4, 4)),
    "U-Net": (UNet, (4, 1, 4, 4)),
    "pre-activation": (lambda: nn.Sequential(*(PreActivation(2) for _ in range(3))), (4, 2, 4, 4)),
    "activation of the input": (
        lambda: nn.Sequential(nn.Conv2d(2, 2, 1), *(ActivationOfInput(2) for _ in range(3))),
        (4, 2, 3, 3),
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODULES)
def test_alike_layers_in_place(name: str) -> None:
    torch.manual_seed(0)
    build, shape = MODULES[name]
    check_at_random(Loss(build()).to(D), (torch.randn(shape, dtype=D),), cases=3)
