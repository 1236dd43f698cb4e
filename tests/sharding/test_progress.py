"""Progress of slow planning."""

import re

import pytest
import torch

from moe import sharding
from moe.sharding.solve import progress
from moe.sharding.solve.progress import PlanningProgress
from tests.sharding.modules import perceptron
from tests.sharding.on_ranks import cores


@pytest.mark.slow
def test_slow_planning_prints_its_stages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(PlanningProgress.__init__, "__defaults__", (0.001, 0.001))
    sharding.plan(perceptron(8, 8, 8), (torch.zeros(8, 8),), cores(4))
    lines = capsys.readouterr().err.splitlines()
    stages = [re.fullmatch(r"planning for \d+ s: (.+)", line).group(1) for line in lines]
    assert stages[0] == "capturing the module"
    assert any(stage.startswith("mesh {'devices': 4}, 1 micro-batch") for stage in stages)


def test_fast_planning_prints_nothing(capsys: pytest.CaptureFixture[str]):
    assert progress.AFTER_S == 5
    with PlanningProgress():
        pass
    assert capsys.readouterr().err == ""
