"""Published models by their dimensions: as many weights as their makers say."""

import pytest

from moe.spec import LanguageModelSpec, SpecError, model_spec, presets

PUBLISHED = {  # billions: all weights, and those that a token meets; None where only a rounded figure was published
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39),
    "qwen3-30b-a3b": (30.5, None),
    "qwen3-235b-a22b": (235, 22),
    "qwen3-next-80b-a3b": (80, None),
    "deepseek-v2": (236, None),
    "deepseek-v3": (671, None),
    "olmoe-1b-7b": (6.9, None),
    "gpt-oss-20b": (20.91, None),
    "gpt-oss-120b": (116.83, None),
    "kimi-k2": (None, 32.6),
    "glam-64b-64e": (1162, 96.6),
    "switch-c": (1571, None),
    "nllb-moe-54b": (54.5, None),
}
ROUNDED = {  # to the digits that were published
    "qwen3-30b-a3b": (3.3, 0.06), "qwen3-next-80b-a3b": (3, 1), "deepseek-v2": (21, 0.6), "deepseek-v3": (37, 0.6),
    "olmoe-1b-7b": (1.3, 0.05),
}  # fmt: skip
WITHOUT_THE_FIRST_TABLE = {"gpt-oss-20b": 3.61, "gpt-oss-120b": 5.13}
PAPER = {"gshard-128e-12l": 12.5, "gshard-128e-36l": 37, "gshard-512e-12l": 50, "gshard-512e-36l": 150,
         "gshard-2048e-12l": 200, "gshard-2048e-36l": 600}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_as_many_weights_as_published(name: str) -> None:
    model = presets.load(name)
    weights, active = PUBLISHED[name]
    if weights is not None:
        assert model.num_parameters() / 1e9 == pytest.approx(weights, rel=0.01)
    if active is not None:
        assert model.num_active_parameters() / 1e9 == pytest.approx(active, rel=0.01)
    if name in ROUNDED:
        figure, within = ROUNDED[name]
        assert model.num_active_parameters() / 1e9 == pytest.approx(figure, abs=within)


@pytest.mark.parametrize("name", WITHOUT_THE_FIRST_TABLE)
def test_gpt_oss_counts_active_weights_without_the_embedding(name: str) -> None:
    model = presets.load(name)
    assert isinstance(model, LanguageModelSpec)
    active = model.num_active_parameters() - model.vocab_size * model.model_dim
    assert active / 1e9 == pytest.approx(WITHOUT_THE_FIRST_TABLE[name], rel=0.01)


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_family_is_as_large_as_its_table_rounds_it(name: str) -> None:
    assert presets.load(name).num_parameters() / 1e9 == pytest.approx(PAPER[name], rel=0.07)


def test_fields_beside_a_preset_override_it_at_any_depth() -> None:
    model = model_spec({"preset": "mixtral-8x7b", "moe": {"num_experts": 16}, "attention": {"num_kv_heads": 4}})
    assert isinstance(model, LanguageModelSpec)
    assert (model.moe.num_experts, model.moe.routing.top_k, model.attention.num_kv_heads) == (16, 2, 4)  # type: ignore


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attention": {"num_kv_heads": 5}}, r"attention.num_kv_heads \(=5\) must divide num_heads \(=32\)"),
        ({"first_dense_layers": 2}, r"ffn_dim is required where layers have no experts"),
        ({"full_attention_every": 4}, r"full_attention_every \(=4\) has no effect without linear_attention"),
        ({"moe_every": 100}, r"moe_every \(=100\) leaves no layer with experts"),
        ({"colour": "red"}, r"colour \(='red'\) is not a known key"),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_is_refused_in_words(changes: dict, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        model_spec({"preset": "mixtral-8x7b", **changes})
