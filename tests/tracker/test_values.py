import json

import pytest

from moe.records import LayerRecord, Sample, StepRecord
from service.tracker.values import number_prefix, scores_of, step_values

LAYERS = (
    LayerRecord(0, (3, 1), max_over_mean=1.5, dropped=0.25, entropy=0.5),
    LayerRecord(2, (4, 0), max_over_mean=2.0, dropped=0.75, entropy=0.1),
)
RECORD = StepRecord(
    step=7, loss=1.5, nll=None, grad_norm=2.0, lr=1e-3, tokens=100, tokens_per_s=50.0, layers=LAYERS,
    held_out={"books": 0.5, "empty": None}, samples=(Sample("a", "b"),), numbers={"accuracy": 0.9},
)  # fmt: skip


def test_values_of_a_step() -> None:
    values = step_values(json.dumps(RECORD.to_plain()), 12.5)
    assert (values.step, values.time_s, values.samples) == (7, 12.5, (("a", "b"),))
    assert values.scalars == {
        "train/loss": 1.5, "train/grad_norm": 2.0, "train/lr": 1e-3, "train/tokens": 100.0,
        "speed/tokens_per_s": 50.0, "held_out/books": 0.5, "module/accuracy": 0.9,
        "experts/max_over_mean": 2.0, "experts/dropped": 0.5, "experts/entropy": 0.3,
    }  # fmt: skip


@pytest.mark.parametrize(("corpus", "name"), [
    ("unpaired_preference", "preference/kl"), ("preference", "preference/kl"), ("module", "module/kl"),
])  # fmt: skip
def test_rewards_have_a_prefix_of_their_own(corpus: str, name: str) -> None:
    text = '{"step": 1, "numbers": {"kl": 0.5, "reward_margin": null}}'
    assert step_values(text, 0.0, numbers=number_prefix({"data": {"corpus": corpus}})).scalars == {name: 0.5}


def test_layers_are_written_one_by_one_on_request() -> None:
    scalars = step_values(json.dumps(RECORD.to_plain()), 0.0, layers=True).scalars
    assert {name: scalars[name] for name in scalars if name.startswith("layer_")} == {
        "layer_0/max_over_mean": 1.5, "layer_0/dropped": 0.25, "layer_0/entropy": 0.5,
        "layer_2/max_over_mean": 2.0, "layer_2/dropped": 0.75, "layer_2/entropy": 0.1,
    }  # fmt: skip


def test_values_that_are_not_finite_are_left_out() -> None:
    text = '{"step": 1, "loss": null, "lr": NaN, "nll": "1.0", "aux_loss": true, "grad_norm": 2.0}'
    assert step_values(text, 0.0).scalars == {"train/grad_norm": 2.0}


def test_scores_are_the_finite_numbers_of_a_report() -> None:
    report = {"sets": {"seen": {"loss": 1.5, "bleu": None}}, "ok": True, "name": "x", "steps": 3, "bad": float("inf")}
    assert scores_of(report) == {"final/sets/seen/loss": 1.5, "final/steps": 3.0}
