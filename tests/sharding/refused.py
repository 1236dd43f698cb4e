"""A module that planning refuses, and the user's line that its problems name."""

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
from moe.spec import Problem, SpecError
from tests.sharding.on_ranks import cores

MESH = {"data": 2, "model": 2}
ONE_AXIS = {"data": 2}
"""For accepted modules: planning two axes takes many times as long."""
BATCH = (torch.randn(8, 6),)


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Plain(nn.Module):
    """Two layers with a function between them, which may return None to leave the hidden values as they are."""

    calls = 0
    kept: ClassVar[dict[Any, Tensor]] = {}

    def __init__(self, middle: Callable[["Plain", Tensor], Any] = lambda module, h: None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.middle = middle
        self.count, self.log, self.table = 0, [], torch.zeros(8)
        self.is_begun, self.scale = False, None
        self.array, self.space, self.slotted = np.zeros(2), SimpleNamespace(calls=0), Slots()
        self.loose = [nn.Parameter(torch.ones(8))]
        self.register_buffer("mean", torch.zeros(8))

    @functools.cached_property
    def half(self) -> float:
        return 0.5

    def forward(self, x: Tensor) -> Any:
        hidden_states = self.first(x)
        replacement = self.middle(self, hidden_states)
        return self.second(hidden_states if replacement is None else replacement).square().mean()


def planning_problems(module: nn.Module, sample: Any = BATCH, hints: Any = None, **options: Any) -> tuple[Problem, ...]:
    """Problems of a module that planning refuses."""
    with pytest.raises(SpecError) as error:
        sharding.plan(module, sample, options.pop("cluster", cores(4)), hints, **{"mesh": MESH} | options)
    return error.value.problems


def lines_of(file: str) -> Callable[[str], str]:
    """A function that returns the place of the line with a comment at its end, as problems name it."""
    path = Path(file)
    source = path.read_text().splitlines()

    def line_of(mark: str) -> str:
        (number,) = [number for number, line in enumerate(source, 1) if line.endswith(f"# {mark}")]
        return f"tests/sharding/{path.name}:{number}"

    return line_of
