"""Progress of plans that take long."""

import re

import pytest
import torch
from torch import nn

from moe import sharding
from moe.sharding.solve import progress
from moe.sharding.solve.progress import PlanningProgress
from tests.sharding.on_ranks import cores


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_a_plan_that_takes_long_says_what_it_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(PlanningProgress.__init__, "__defaults__", (0.001, 0.001))
    sharding.plan(Slow(), (torch.zeros(8, 8),), cores(4))
    lines = capsys.readouterr().err.splitlines()
    stages = [re.fullmatch(r"planning for \d+ s: (.+)", line).group(1) for line in lines]
    assert stages[0] == "capturing the module"
    assert any(stage.startswith("mesh {'devices': 4}, 1 micro-batch") for stage in stages)


def test_a_plan_that_takes_a_moment_says_nothing(capsys: pytest.CaptureFixture[str]):
    assert progress.AFTER_S == 5
    with PlanningProgress():
        pass
    assert capsys.readouterr().err == ""
