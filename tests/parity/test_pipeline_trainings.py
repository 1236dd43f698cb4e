"""Trainings of every kind, with adapters and of encoder-decoder models, compute the same in pipeline stages as on one
process: losses, every gradient, the norm, routers' decisions and the next weights."""

from dataclasses import replace
from typing import Any

import pytest

from moe.spec import AdafactorSpec, MuonSpec, TranslationModelSpec
from tests.parity.combinations import ROUTERS, assert_same, model_of, run_on, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import with_adapter
from tests.parity.sequences import ANSWERS, PAIRS, SOME
from tests.parity.test_pipeline import LAYOUTS, staged_model
from tests.parity.trajectory import Degrees, Shape, run

TRAININGS: dict[str, tuple[dict[str, Any], Shape]] = {
    "conversations": ({}, Shape(learned=SOME)),
    "DPO": ({"preference_loss": "dpo"}, Shape(learned=PAIRS)),
    "ORPO": ({"preference_loss": "orpo"}, Shape(learned=PAIRS)),
    "KTO": ({"preference_loss": "kto"}, Shape(learned=ANSWERS)),
    "Adafactor": ({"optimizer": AdafactorSpec(name="adafactor", peak_lr=1e-2)}, Shape()),
    "Muon": ({"optimizer": MuonSpec(name="muon", peak_lr=2.5e-3, weight_decay=0.1)}, Shape()),
    "moving average": ({"ema_decay": 0.9}, Shape()),
    "label smoothing": ({"label_smoothing": 0.1}, Shape()),
    "frozen first stage": ({"freeze": ("embedding.*", "layers.0.*", "layers.1.*")}, Shape()),
    "frozen last stage": ({"freeze": ("layers.2.*", "layers.3.*", "norm.*", "output.*")}, Shape()),
}
STAGED = (
    Degrees(pipeline=2, micro_batch_groups=2), Degrees(pipeline=2, virtual_stages=2, micro_batch_groups=1),
    Degrees(pipeline=2, data=2, fsdp=2, expert_fsdp=2, micro_batch_groups=2, schedule="gpipe"),
    Degrees(pipeline=2, expert=2, tensor=2, micro_batch_groups=1), Degrees(pipeline=4, micro_batch_groups=1),
    Degrees(pipeline=2, schedule="zero_bubble", micro_batch_groups=1),
    Degrees(pipeline=2, schedule="zb_v", virtual_stages=2, micro_batch_groups=1),
)  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("training", "degrees"),
    [(training, STAGED[(index + offset) % len(STAGED)])
     for index, training in enumerate(TRAININGS) for offset in (0, 3)],
    ids=str,
)  # fmt: skip
def test_every_training_computes_the_same(ranks: Pools, training: str, degrees: Degrees) -> None:
    fields, shape = TRAININGS[training]
    model = staged_model("GQA with windows, sinks and biases", "softmax after top-k, best first")
    records = run_on(ranks, degrees, model, train_of(**fields), shape, 3)
    assert_same(records, run(model, train_of(**fields), Degrees(), shape, 3), 1e-10)


ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 2, "dropout": 0.2}, "last layers": {"rank": 2, "targets": ["layers.2.*", "layers.3.*"]},
    "attention": {"rank": 3, "alpha": 5.0, "targets": ["*.attention.*"]},
    "DoRA": {"rank": 2, "dora": True, "targets": ["*.attention.*"]},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_compute_the_same(ranks: Pools, adapter: str, tied: bool) -> None:
    attention = "GQA with norms as wide as all heads" if tied else "GQA with windows, sinks and biases"
    model = with_adapter(staged_model(attention, "softmax"), ADAPTERS[adapter])
    for degrees in STAGED:
        records = run_on(ranks, degrees, model, train_of(), Shape(), 4)
        assert_same(records, run(model, train_of(), Degrees(), Shape(), 4), 1e-10)


PAIR_LAYOUTS = (
    *(replace(degrees, micro_batch_groups=1) for degrees in LAYOUTS), *STAGED[-2:],
    replace(STAGED[-2], data=2, fsdp=2, expert_fsdp=2), replace(STAGED[-1], expert=2, tensor=2, recompute="full"),
)  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("shared", [True, False], ids=["one table", "two tables"])
@pytest.mark.parametrize("number", range(len(PAIR_LAYOUTS)))
def test_encoder_and_decoder_compute_the_same(ranks: Pools, number: int, shared: bool) -> None:
    """The encoder's output reaches the decoder layers of every stage."""
    degrees, router = PAIR_LAYOUTS[number], [*ROUTERS][number % len(ROUTERS)]
    model = TranslationModelSpec(**{**model_of(**ROUTERS[router]).model_dump(), "share_vocabulary": shared})
    records = run_on(ranks, degrees, model, train_of(), Shape(), 3)
    assert_same(records, run(model, train_of(), Degrees(), Shape(), 3), 1e-10)
