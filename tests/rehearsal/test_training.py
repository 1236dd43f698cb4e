"""Training on a device of its own type equals one process on the CPU: every router, dispatcher and kind of layout;
steps and whole runs."""

from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from tests.grid import item_params
from tests.parity.combinations import LAYOUTS, OPTIONS, ROUTERS, assert_ranks_same, model_of, train_with, with_option
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, run
from tests.rehearsal.run import on_device, runs, save_and_resume
from tests.unit.train_runs import corpus, job

CASES = [
    (degrees, option, router)
    for (degrees, option), router in zip(
        [
            (degrees, option)
            for (family, layouts), option in zip(LAYOUTS.items(), cycle(OPTIONS))
            for degrees in (layouts[0], layouts[-1])
            if with_option(degrees, option) is not None
        ],
        cycle(ROUTERS),
    )
]
"""The smallest and the largest layout of each family, each with another option and another router."""


def test_every_family_option_and_router_is_met() -> None:
    families = {family for family, layouts in LAYOUTS.items() for degrees, _, _ in CASES if degrees in layouts}
    assert families == LAYOUTS.keys()
    assert {option for _, option, _ in CASES} == set(OPTIONS)
    assert {router for _, _, router in CASES} == ROUTERS.keys()


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", item_params(CASES, 2))
def test_steps_on_the_device_are_those_of_one_process_on_the_cpu(ranks: Pools, case: tuple[Degrees, str, str]) -> None:
    degrees, option, router = case
    layout = with_option(degrees, option)
    inputs, shape = (model_of(**ROUTERS[router]), train_with(option)), Shape(groups=4)
    one_process = run(*inputs, Degrees(micro_batch_groups=4), shape, 2)
    assert_ranks_same(ranks[layout.workers].run(on_device, *inputs, layout, shape, 2), one_process, 1e-10)


RESUMED = [
    (layouts[-1], option, router)
    for layouts, option, router in zip(
        (LAYOUTS[family] for family in LAYOUTS), cycle(("Adafactor", "without")), islice(cycle(ROUTERS), 1, None)
    )
] + [(Degrees(expert=2), "all", next(iter(ROUTERS)))]


@pytest.mark.slow
@pytest.mark.parametrize("case", item_params(RESUMED, 3))
def test_runs_saved_on_the_device_go_on(ranks: Pools, tmp_path: Path, case: tuple[Degrees, str, str]) -> None:
    """The largest layout of each family, and every router once."""
    degrees, option, router = case
    layout = with_option(degrees, option)
    inputs, shape = (model_of(**ROUTERS[router]), train_with(option)), Shape(groups=4)
    one_process = save_and_resume(*inputs, Degrees(micro_batch_groups=4), shape, f"{tmp_path}/one", "cpu")
    assert one_process[0] == one_process[1], "bit for bit"
    for losses in ranks[layout.workers].run(save_and_resume, *inputs, layout, shape, f"{tmp_path}/device"):
        assert losses[0] == losses[1], "bit for bit"
        assert losses[0] == pytest.approx(one_process[0], rel=1e-10, abs=1e-10)


ALIKE: dict[str, Any] = {"rel": 1e-10, "abs": 1e-10}


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "workers"), [pytest.param("adamw", 2, marks=pytest.mark.grid), ("adafactor", 1)])
def test_a_run_on_the_device_is_the_run_on_the_cpu(ranks: Pools, tmp_path: Path, workers: int, optimizer: str) -> None:
    train = {
        "num_steps": 4, "dtype": "float64", "optimizer": {"name": optimizer, "peak_lr": 1e-2},
        "evaluation": {"max_pairs": 6, "num_examples": 2, "every_steps": 2},
    }  # fmt: skip
    spec = job(corpus(tmp_path), workers=workers, expert=workers, train=train)
    results = ranks[workers].run(runs, spec, tmp_path)[0]
    assert [step["step"] for step in results["cpu"]["steps"]] == [1, 2, 3, 4]
    for name in ("device", "half and half"):
        for actual, expected in zip(results[name]["steps"], results["cpu"]["steps"], strict=True):
            for figure in ("loss", "nll", "aux_loss", "grad_norm"):
                assert actual[figure] == pytest.approx(expected[figure], **ALIKE)
            assert [layer["load"] for layer in actual["layers"]] == [layer["load"] for layer in expected["layers"]]
            if "held_out" in expected:
                assert actual["held_out"] == pytest.approx(expected["held_out"], **ALIKE)
        actual, expected = results[name]["report"], results["cpu"]["report"]
        assert actual["examples"] == expected["examples"]
        assert {name: actual["sets"][name]["loss"] for name in actual["sets"]} == pytest.approx(
            {name: expected["sets"][name]["loss"] for name in expected["sets"]}, **ALIKE
        )
