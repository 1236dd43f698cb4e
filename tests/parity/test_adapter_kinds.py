"""Adapters of tables, DoRA and trained rows of tokens learn the same under every layout as on one process."""

from typing import Any

import pytest

from moe.spec import LanguageModelSpec
from tests.grid import index_params
from tests.parity.combinations import LAYOUTS, assert_same, run_on, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, dense, language_model, with_adapter
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
    adapter = {"rank": 3, "alpha": 5.0, "dropout": (0.0, 0.3)[number // 3 % 2], **KINDS[kind]}
    return with_adapter(LanguageModelSpec(**fields), adapter)


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", index_params(EVERY_LAYOUT, 3))
def test_every_kind_of_adapter_is_trained_alike_on_every_layout(ranks: Pools, number: int) -> None:
    spec, degrees = model_of(number), EVERY_LAYOUT[number]
    if spec.moe is None and degrees.expert > 1:
        degrees = (Degrees(data=4, tensor=2, fsdp=2), Degrees(data=2, tensor=2))[number % 2]
    expected = run(spec, train_of(), Degrees(), Shape(), 3)
    assert_same(run_on(ranks, degrees, spec, train_of(), Shape(), 3), expected, 1e-10)
    names = {parameter.name for parameter in spec.parameters() if not parameter.frozen}
    assert expected[-1]["gradients"].keys() == names
    assert all(norm > 0 for norm in expected[-1]["gradients"].values())
