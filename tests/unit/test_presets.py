"""Published models by their dimensions: their numbers of weights are the published ones."""

import pytest

from moe.spec import model_spec, presets
from tests.refusals import expect_problem

PUBLISHED = {  # billions: all weights and active ones, each with its tolerance (None: 1%); None where none is published
    "mixtral-8x7b": (46.7, 12.9, None), "mixtral-8x22b": (141, 39, None), "qwen3-30b-a3b": (30.5, 3.3, 0.06),
    "qwen3-235b-a22b": (235, 22, None), "qwen3-next-80b-a3b": (80, 3, 1), "qwen3.5-35b-a3b": (35, 3, 0.5),
    "qwen3.5-397b-a17b": (397, 17, 0.5), "deepseek-v2": (236, 21, 0.6),
    "deepseek-v3": (671, 37, 0.6), "olmoe-1b-7b": (6.9, 1.3, 0.05), "gpt-oss-20b": (20.91, None, None),
    "gpt-oss-120b": (116.83, None, None), "kimi-k2": (None, 32.6, None), "kimi-k2.5": (None, 32.6, None),
    "qwen3-vl-30b-a3b": (30.5, 3.3, 0.06), "qwen3-vl-235b-a22b": (235, 22, None), "glam-64b-64e": (1162, 96.6, None),
    "mistral-small-4": (119, 6.5, 0.7), "ernie-4.5-21b-a3b": (21.8, 3, 0.5), "hunyuan-a13b": (80.4, 13, 0.5),
    "glm-4.7-flash": (30, 3, 1), "switch-c": (1571, None, None), "nllb-moe-54b": (54.5, None, None),
    "deepseek-v3.2": (671, 37, 1.5), "glm-5": (744, 40, 2), "lfm2-8b-a1b": (8.3, 1.5, 0.1),
    "granite-4.0-h-tiny": (7, 1, 0.5), "granite-4.0-h-small": (32, 9, 0.5),
    "nemotron-3-nano-30b-a3b": (31.6, 3.6, 0.05), "llama-4-scout-17b-16e": (108, 17, 0.5),
    "llama-4-maverick-17b-128e": (400, 17, 0.5), "gemma-4-26b-a4b": (25.2, 3.8, 0.05), "phi-3.5-moe": (41.9, 6.6, 0.05),
    "dots.llm1": (142.8, 14, 0.05), "ling-mini-2.0": (16.26, 1.43, 0.01), "sarvam-30b": (32, None, None),
    "ling-lite": (16.8, 2.75, 0.05), "sarvam-105b": (105, None, None), "flexolmo-7x7b": (33, None, None),
    "mistral-7b": (7.248, 7.248, 0.001), "qwen2.5-7b": (7.616, 7.616, 0.001), "gemma-3-1b": (1, 1, 0.001),
}  # fmt: skip
WITHOUT_THE_FIRST_TABLE = {"gpt-oss-20b": 3.61, "gpt-oss-120b": 5.13}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_as_many_weights_as_published(name: str) -> None:
    model = presets.load(name)
    weights, active, tolerance = PUBLISHED[name]
    if weights is not None:
        assert model.num_parameters() / 1e9 == pytest.approx(weights, rel=0.01)
    if active is not None:
        assert model.num_active_parameters() / 1e9 == pytest.approx(
            active, rel=0.01 if tolerance is None else 0, abs=tolerance
        )


@pytest.mark.parametrize("name", WITHOUT_THE_FIRST_TABLE)
def test_gpt_oss_counts_active_weights_without_the_embedding(name: str) -> None:
    model = presets.load(name)
    active = model.num_active_parameters() - model.vocab_size * model.model_dim
    assert active / 1e9 == pytest.approx(WITHOUT_THE_FIRST_TABLE[name], rel=0.01)


def test_fields_beside_a_preset_override_it_at_any_depth() -> None:
    model = model_spec({"preset": "mixtral-8x7b", "moe": {"num_experts": 16}, "attention": {"num_kv_heads": 4}})
    assert (model.moe.num_experts, model.moe.routing.top_k, model.attention.num_kv_heads) == (16, 2, 4)
    indexer = model_spec({"preset": "glm-5.2", "attention": {"indexer": {"loss_coefficient": 0.5}}}).attention.indexer
    assert (indexer.loss_coefficient, indexer.top_k, indexer.shared_layers[:4]) == (0.5, 2048, (3, 4, 5, 7))
    assert model_spec({"preset": "glm-5", "attention": {"indexer": None}}).attention.indexer is None


@pytest.mark.parametrize(
    ("changes", "code", "path", "value"),
    [
        ({"attention": {"num_kv_heads": 5}}, "not_divisible", "attention.num_kv_heads", 5),
        ({"first_dense_layers": 2}, "missing", "ffn_dim", None),
        ({"full_attention_every": 4}, "not_applicable", "full_attention_every", 4),
        ({"moe_every": 100, "ffn_dim": 8}, "empty", "moe_every", 100),
        ({"colour": "red"}, "unknown_key", "colour", "red"),
    ],
)
def test_an_impossible_model_is_refused(changes: dict, code: str, path: str, value: object) -> None:
    with expect_problem(code, path, value):
        model_spec({"preset": "mixtral-8x7b", **changes})
