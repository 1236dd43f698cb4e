"""What a user does with an applied module: it has the plan's effect, or is refused in words."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from tests.sharding.on_ranks import cores


def applied_to(module: nn.Module, *sample: Any, **options: Any) -> sharding.Applied:
    plan = sharding.plan(module, sample, cores(1), mesh={"devices": 1})
    return sharding.apply(module, plan, sample=sample, **options)


class Difference(nn.Module):
    """Of what a function takes out of the batch, so that its order counts."""

    def __init__(self, both: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.both, self.scale = both, nn.Parameter(torch.tensor(3.0))

    def forward(self, batch: Any) -> Tensor:
        x, y = self.both(batch)
        return ((x - 2 * y) * self.scale).sum()


X, Y = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)


def test_a_dict_is_taken_by_its_keys():
    module = Difference(lambda batch: (batch["x"], batch["y"]["only"]))
    applied = applied_to(module, {"x": X, "y": {"only": Y}})
    assert applied({"y": {"only": Y}, "x": X}).item() == module({"x": X, "y": {"only": Y}}).item() == 9.0


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((X, Y), r"is nested otherwise: \(_, _\); the plan is for 2: \(\[_, _\],\)"),
        (((X, Y),), r"is nested otherwise: \(\(_, _\),\); the plan is for 2: \(\[_, _\],\)"),
        (([X, Y, Y],), r"has 3 values: \(\[_, _, _\],\); the plan is for 2: \(\[_, _\],\)"),
        (({"x": X, "y": Y},), r"\(\{'x': _, 'y': _\},\); the plan is for 2"),
        ((X,), r"has 1 values: \(_,\); the plan is for 2"),
    ],
    ids=["flat", "tuple", "longer", "dict", "tensor"],
)
def test_a_batch_nested_otherwise(batch: tuple[Any, ...], words: str):
    applied = applied_to(Difference(lambda batch: (batch[0], batch[1])), [X, Y])
    with pytest.raises(ValueError, match=words):
        applied(*batch)
    assert applied([X, Y]).item() == 9.0


class Settings(dict[str, Any]):
    """A dict whose keys are attributes, and which therefore has no `__deepcopy__` that could be asked for."""

    __getattr__ = dict.__getitem__


class Uncopied(nn.Module):
    """A module with what Python cannot copy, beside what a copy must have of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.np, self.settings = threading.Lock(), np, Settings(width=3)
        self.file = open(__file__)  # noqa: SIM115
        self.first = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.steps = [self.first, self.drop, self.lock]
        self.finish = self.finished
        self.norm = nn.BatchNorm1d(self.settings.width)

    def finished(self, x: Tensor) -> Tensor:
        return self.norm(x).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps[:2]:
            x = step(x)
        return self.finish(x)


def test_a_module_that_cannot_be_copied_has_both_modes():
    torch.manual_seed(0)
    module = Uncopied()
    applied = applied_to(module, X)
    for _ in range(2):
        applied(X).backward()
    assert applied.get_parameter("first.weight").grad is not None
    module.norm.load_state_dict(applied.get_submodule("norm").state_dict())
    assert torch.allclose(applied.eval()(X), module.eval()(X))
    assert module.steps[0] is module.first and not module.first.weight.is_meta
    assert applied.train().training
    module.file.close()


def test_parts_of_one_object_that_cannot_be_copied():
    class Shared:
        def __init__(self) -> None:
            self.factor, self.lock = 2.0, threading.Lock()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))
            self.one = Shared()
            self.other = [self.one]

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale * self.one.factor * self.other[0].factor).sum()

    assert applied_to(Twice(), Y).eval()(Y).item() == 72.0
