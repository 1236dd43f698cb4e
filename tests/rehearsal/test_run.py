"""Whole runs on the device: steps, checkpoints, resuming, losses along the way, the evaluation at the end."""

from pathlib import Path
from typing import Any

import pytest

from tests.parity.gloo_ranks import Pools
from tests.rehearsal.run import runs
from tests.unit.train_runs import corpus, job

ALIKE: dict[str, Any] = {"rel": 1e-10, "abs": 1e-10}


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "workers"), [pytest.param("adamw", 2, marks=pytest.mark.grid), ("adafactor", 1)])
def test_a_run_on_the_device_is_the_run_on_the_cpu(ranks: Pools, tmp_path: Path, workers: int, optimizer: str) -> None:
    train = {
        "num_steps": 4, "dtype": "float64", "optimizer": {"name": optimizer, "peak_lr": 1e-2},
        "evaluation": {"max_pairs": 6, "num_examples": 2, "every_steps": 2},
    }  # fmt: skip
    spec = job(corpus(tmp_path), workers=workers, expert=workers, train=train)
    found = ranks[workers].run(runs, spec, tmp_path)[0]
    assert [step["step"] for step in found["cpu"]["steps"]] == [1, 2, 3, 4]
    for name in ("device", "half and half"):
        for here, there in zip(found[name]["steps"], found["cpu"]["steps"], strict=True):
            for figure in ("loss", "nll", "aux_loss", "grad_norm"):
                assert here[figure] == pytest.approx(there[figure], **ALIKE)
            assert [each["load"] for each in here["layers"]] == [each["load"] for each in there["layers"]]
            if "held_out" in there:
                assert here["held_out"] == pytest.approx(there["held_out"], **ALIKE)
        here, there = found[name]["report"], found["cpu"]["report"]
        assert here["examples"] == there["examples"]
        assert {each: here["sets"][each]["loss"] for each in here["sets"]} == pytest.approx(
            {each: there["sets"][each]["loss"] for each in there["sets"]}, **ALIKE
        )
