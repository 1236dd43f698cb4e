"""A module that is to be refused, what it is told, and the user's line in that."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from moe.spec import SpecError
from tests.sharding.on_ranks import cores

MESH = {"data": 2, "model": 2}
ONE_AXIS = {"data": 2}
"""For what is accepted: two axes take many times as long to plan."""
BATCH = (torch.randn(8, 6),)


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Plain(nn.Module):
    """Two layers, between which something is done."""

    calls = 0
    kept: ClassVar[dict[Any, Tensor]] = {}

    def __init__(self, between: Callable[["Plain", Tensor], Tensor] = lambda module, h: h) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.between = between
        self.count, self.log, self.table = 0, [], torch.zeros(8)
        self.is_begun, self.scale = False, None
        self.array, self.space, self.slotted = np.zeros(2), SimpleNamespace(calls=0), Slotted()
        self.loose = [nn.Parameter(torch.ones(8))]
        self.register_buffer("mean", torch.zeros(8))

    @functools.cached_property
    def half(self) -> float:
        return 0.5

    def forward(self, x: Tensor) -> Any:
        return self.second(self.between(self, self.first(x))).square().mean()


def refused(module: nn.Module, sample: Any = BATCH, hints: Any = None, **options: Any) -> str:
    """What planning the module raises."""
    with pytest.raises(SpecError) as error:
        sharding.plan(module, sample, options.pop("cluster", cores(4)), hints, **{"mesh": MESH} | options)
    return str(error.value)


def lines_of(file: str) -> Callable[[str], str]:
    """Place, as errors have it, of the line of a file that ends with a comment."""
    path = Path(file)
    source = path.read_text().splitlines()

    def line_of(mark: str) -> str:
        (number,) = [at for at, line in enumerate(source, 1) if line.endswith(f"# {mark}")]
        return f"tests/sharding/{path.name}:{number}"

    return line_of
