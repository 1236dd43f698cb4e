"""Adapters of tables, DoRA and trained rows of tokens learn the same under every layout as on one process."""

import math
from typing import Any

import pytest

from moe.spec import LanguageModelSpec
from tests.grid import index_params
from tests.parity.combinations import LAYOUTS, assert_same, run_on, train_of, with_option
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, dense, language_model, with_adapter
from tests.parity.sequences import PAIRS
from tests.parity.trajectory import Degrees, Shape, run

EVERY_LAYOUT = [degrees for family in LAYOUTS.values() for degrees in family]
KINDS: list[dict[str, Any]] = [
    {"targets": ["*.attention.*", "output.weight"], "dora": True},
    {"targets": ["*.attention.*", "*.experts.*", "embedding.weight", "output.weight"],
     "groups": [{"pattern": "output.weight", "rank": 2, "alpha": 3.0}]},
    {"targets": ["*.attention.*"], "dora": True,
     "trainable_token_indices": {"embedding": [7, 0, 5, 19, 2], "output": [3, 1, 2]}},
    {"targets": ["*.attention.*", "*.dense.*", "output.weight"], "dora": True},
]  # fmt: skip
"""Adapters; the last is of a dense model."""


def model_of(number: int) -> LanguageModelSpec:
    attention, kind = list(ATTENTIONS)[number % len(ATTENTIONS)], number // 2 % len(KINDS)
    spec = language_model(attention, router="softmax_topk", shared_hidden_dim=5)
    if kind == len(KINDS) - 1:
        spec = dense(spec)
    fields = {**spec.model_dump(), "tie_embeddings": False}
    base = ("float32", "nf4", "int8")[number % 3]
    adapter = {"rank": 3, "alpha": 5.0, "dropout": (0.0, 0.3)[number // 3 % 2], "base": base, **KINDS[kind]}
    return with_adapter(LanguageModelSpec(**fields), adapter)


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", index_params(EVERY_LAYOUT, 3))
def test_every_kind_of_adapter_is_trained_alike_on_every_layout(ranks: Pools, number: int) -> None:
    spec, degrees = model_of(number), EVERY_LAYOUT[number]
    if spec.moe is None and degrees.expert > 1:
        degrees = (Degrees(data=4, tensor=2, fsdp=2), Degrees(data=2, tensor=2))[number % 2]
    expected = run(spec, train_of(), Degrees(), Shape(), 3)
    option = ("without", "recomputation, selective", "recomputation, full", "accumulation")[number % 4]
    optional_degrees = with_option(degrees, option)
    assert optional_degrees is not None
    assert_same(run_on(ranks, optional_degrees, spec, train_of(), Shape(), 3), expected, 1e-10)
    names = {parameter.name for parameter in spec.parameters() if not parameter.frozen}
    assert expected[-1]["gradients"].keys() == names
    assert all(norm > 0 for norm in expected[-1]["gradients"].values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("degrees", [Degrees(data=2, tensor=2), Degrees(data=2, fsdp=2)], ids=str)
def test_preferences_are_learned_alike(ranks: Pools, degrees: Degrees, kind: int) -> None:
    """The reference model is the base without adapter, magnitudes and trained rows: at first both are equal."""
    spec, shape = model_of(2 * kind), Shape(learned=PAIRS)
    expected = run(spec, train_of(), Degrees(), shape, 3)
    assert_same(run_on(ranks, degrees, spec, train_of(), shape, 3), expected, 1e-10)
    assert expected[2]["nll"] < expected[0]["nll"]
    if not spec.adapter.dropout:
        assert expected[0]["nll"] == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_arithmetic_may_be_bfloat16(kind: int) -> None:
    spec = model_of(2 * kind)
    records, expected = (run(spec, train_of(dtype), Degrees(), Shape(), 2) for dtype in ("bfloat16", "float64"))
    assert records[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=0.02)
