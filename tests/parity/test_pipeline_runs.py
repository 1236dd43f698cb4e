"""Whole runs in pipeline stages are those of one process: losses, samples, averages and reports; and the search for the
origin of values that are not finite finds it on any stage."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.parallel import Layout
from moe.train.nonfinite import first_fault
from tests.parity.combinations import model_of, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.test_checkpoint_ranks import assert_same_course, assert_same_sets, run_course
from tests.parity.test_language_runs import assert_same_report, spec_of
from tests.parity.test_pipeline import staged_model
from tests.parity.trajectory import Degrees, Model, Shape, batch_of, state_of
from tests.unit.train_runs import corpus, job

LAYOUTS = [
    (2, {"pipeline": 2, "micro_batch_groups": 1}), (4, {"pipeline": 2, "expert": 2, "schedule": "gpipe"}),
    (4, {"pipeline": 2, "expert": 1, "data": 2, "fsdp": 2, "micro_batch_groups": 1}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "parallel"), LAYOUTS, ids=str)
def test_runs_of_language_models(ranks: Pools, tmp_path: Path, workers: int, parallel: dict[str, Any]) -> None:
    single_spec, multi_spec = (
        spec_of(tmp_path, number, "tied, normed as a whole", axes, ema_decay=0.8)
        for number, axes in ((1, {}), (workers, parallel))
    )
    _, expected, *_, report = run_course(single_spec, f"{tmp_path}/one", tmp_path / "cache")
    for _, records, *_, actual in ranks[workers].run(run_course, multi_spec, f"{tmp_path}/many", tmp_path / "cache"):
        assert_same_report(actual, report)
        if records:
            assert_same_course(records, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "parallel"), LAYOUTS, ids=str)
def test_runs_of_translation_models(ranks: Pools, tmp_path: Path, workers: int, parallel: dict[str, Any]) -> None:
    evaluation = {"every_steps": 2, "max_pairs": 6, "num_examples": 2}
    train, data = {"dtype": "float64", "num_steps": 4, "evaluation": evaluation}, corpus(tmp_path)
    single_spec, multi_spec = (
        job(data, workers=number, parallel=axes, train=train) for number, axes in ((1, {}), (workers, parallel))
    )
    _, expected, *_, report = run_course(single_spec, f"{tmp_path}/one", tmp_path / "cache")
    _, records, *_, actual = ranks[workers].run(run_course, multi_spec, f"{tmp_path}/many", tmp_path / "cache")[0]
    assert_same_course(records, expected)
    assert expected[1]["label_loads"]["labels"]
    assert_same_sets(actual, report)


def faults(degrees: Degrees, model: Model, parts: list[str]) -> list[str | None]:
    """What is found first where a parameter is infinite, or so large that outputs are."""
    plan, found = degrees.plan(8), list[str | None]()
    layout = Layout.build(plan)
    state = state_of(model, train_of(), layout)
    batch = batch_of(layout, plan, Shape(), model, 1)
    for value in (torch.inf, 1e308):
        for part in parts:
            changed = [parameter.local for parameter in state.parameters if parameter.name == part]
            values = [parameter.detach().clone() for parameter in changed]
            with torch.no_grad():
                for parameter in changed:
                    parameter.fill_(value)
                found.append(first_fault(state, batch))
                for parameter, before in zip(changed, values, strict=True):
                    parameter.copy_(before)
    layout.close()
    return found


@pytest.mark.parametrize("kind", ["language", "translation"])
def test_the_first_fault_is_found_on_any_stage(ranks: Pools, kind: str) -> None:
    parts = ["layers.1.feed_forward.moe.experts.w_in", "layers.2.attention.output.weight", "norm.weight"]
    model: Model = staged_model("GQA with windows, sinks and biases", "softmax")
    if kind == "translation":
        parts = ["encoder.0.feed_forward.dense.w_in.weight", "decoder.1.norm.weight", "decoder_norm.weight"]
        model = model_of()
    expected = faults(Degrees(micro_batch_groups=1), model, parts)
    assert None not in expected
    for degrees in (Degrees(pipeline=2, virtual_stages=2), Degrees(pipeline=2)):
        for answer in ranks[2].run(faults, replace(degrees, micro_batch_groups=1), model, parts):
            assert answer == expected
