"""Exports as transformers 4 and vLLM read them, which do not know what transformers 5 writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from moe.interchange.config import build_config
from moe.interchange.families import BY_TYPE
from moe.interchange.releases import (
    CURRENT,
    OLDER,
    PEFT,
    UNKNOWN_TO_OLDER,
    WRAPPERS_OF_OLDER,
    adapter_readers,
    readers,
    unlike_older,
)
from moe.spec import LanguageModelSpec
from moe.spec.language import RopeSpec
from tests.interchange import tiny

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
    YARN,
    {**YARN, "truncate": False, "attention_factor": 1.5},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
]  # fmt: skip
BY_LAYER_TYPE = {
    "gemma3_text": "rope_local_base_freq",
    "mimo_v2_flash": "swa_rope_theta",
    "gemma4_text": None,
    "mellum": None,
}
"""Families with RoPE of each layer type: the older key of the base of layers with a window, if there is one."""
ONE_FORM = {"nemotron_h", "gemma4_text", "mellum"}
"""Families without positions, or without older keys of them."""
EXPERTS = {
    "mixtral": "num_local_experts", "qwen2_moe": "num_experts", "qwen3_moe": "num_experts", "olmoe": "num_experts",
    "deepseek_v2": "n_routed_experts", "deepseek_v3": "n_routed_experts", "gpt_oss": "num_local_experts",
    "glm4_moe": "n_routed_experts", "minimax_m2": "num_local_experts", "granitemoe": "num_local_experts",
    "granitemoeshared": "num_local_experts", "qwen3_next": "num_experts", "dots1": "n_routed_experts",
    "phimoe": "num_local_experts",
}  # fmt: skip
"""Name of the number of experts in each family's class of transformers 4.57."""


def rope_of_older(config: dict[str, Any]) -> dict[str, Any]:
    """Positions that transformers 4.57 computes by a config, as its `modeling_rope_utils` reads it."""
    scaling = config["rope_scaling"]
    positions = {"base": config["rope_theta"], "fraction": config.get("partial_rotary_factor", 1.0)}
    kind = "default" if scaling is None else scaling["rope_type"]
    if kind == "default":
        return {**positions, "kind": kind}
    longest = config["max_position_embeddings"]
    original = longest if kind == "dynamic" else scaling.get("original_max_position_embeddings") or longest
    extras = {key: scaling.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
    extras |= {"truncate": scaling.get("truncate", True)} if kind == "yarn" else {}
    extras |= {name: scaling.get(name) for name in ("short_factor", "long_factor", "short_mscale", "long_mscale")}
    return {**positions, "kind": kind, "factor": scaling.get("factor"), **extras,
            "original": None if kind == "linear" else original}  # fmt: skip


def rope_of_ours(rope: RopeSpec) -> dict[str, Any]:
    positions = {"base": rope.base, "fraction": rope.fraction}
    if rope.scaling is None:
        return {**positions, "kind": "default"}
    scaling = rope.scaling.model_dump(mode="json")
    extras = {key: scaling.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
    extras |= {"truncate": scaling["truncate"]} if rope.scaling.kind == "yarn" else {}
    extras |= {f"{length}_mscale": scaling.get(f"{length}_mscale") for length in ("short", "long")}
    extras |= {f"{length}_factor": scaling.get(f"{length}_factors") for length in ("short", "long")}
    return {**positions, "kind": rope.scaling.kind, "factor": scaling.get("factor"), **extras,
            "original": scaling.get("original_tokens")}  # fmt: skip


def config_of(family: str, rope: dict[str, Any]) -> dict[str, Any]:
    """A config as transformers 5 writes it, with `rope_parameters` alone; refused settings are replaced or omitted."""
    if family == "mistral4" and rope["rope_type"] == "default":
        rope = {"rope_type": "linear", "factor": 1.0}
    if family == "phimoe" and rope["rope_type"] != "default":
        rope = tiny.LONG_ROPE
    if family in BY_LAYER_TYPE:
        rope = {key: value for key, value in rope.items() if key != "truncate"}
        local = {"rope_type": "default", "rope_theta": 2e4}
        partial = {"partial_rotary_factor": 0.5} if family == "mimo_v2_flash" else {}
        by_type = {"full_attention": {**rope, **partial, "rope_theta": 3e4}, "sliding_attention": {**local, **partial}}
        return tiny.config_of_family(family, rope_parameters=by_type)
    wide = {"head_dim": 16} if family in ("qwen3_next", "qwen3_5_moe_text") else {}
    config = tiny.config_of_family(family, rope_parameters={**rope, "rope_theta": 3e4}, **wide)
    assert "rope_theta" not in config
    return config


def main_rope(spec: LanguageModelSpec, family: str) -> RopeSpec:
    """RoPE of all layers, of those without a window, or of those with one if only they rotate heads."""
    local = None if family in BY_LAYER_TYPE else spec.local_attention
    return (local or spec.attention).rope


@pytest.mark.sample(44)  # each family and each kind of RoPE
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join([rope["rope_type"], *map(str, list(rope)[5:])]))
@pytest.mark.parametrize("family", sorted(tiny.CONFIGS.keys() - ONE_FORM))
def test_both_forms_of_positions_are_written_and_say_the_same(family: str, rope: dict[str, Any]):
    config = config_of(family, rope)
    spec = tiny.spec_of(config)
    for export in (build_config(spec, None, "bfloat16"), build_config(spec, config, "bfloat16")):
        parameters = export["rope_parameters"]
        if family in BY_LAYER_TYPE:
            assert parameters["sliding_attention"]["rope_theta"] == export[BY_LAYER_TYPE[family]] == 2e4
            assert tiny.spec_of(export).local_attention.rope.base == 2e4
            parameters = parameters["full_attention"]
        assert parameters["rope_theta"] == export["rope_theta"] == 3e4
        if family != "mimo_v2_flash":  # unknown to transformers 4, and without a key for scaling in vLLM
            assert rope_of_older(export) == rope_of_ours(main_rope(spec, family))
        assert main_rope(tiny.spec_of(export), family) == main_rope(spec, family)
        assert export["dtype"] == export["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("family", sorted(tiny.CONFIGS))
def test_transformers_5_reads_an_export_as_the_folder_it_came_from(family: str, tmp_path: Path):
    for rope in ROPES:
        config, read = config_of(family, rope), []
        for content in ({**config, "dtype": "float32"}, build_config(tiny.spec_of(config), config, "float32")):
            (tmp_path / "config.json").write_text(json.dumps(content))
            read.append(AutoConfig.from_pretrained(tmp_path).to_dict())
            rope_parameters = read[-1]["rope_parameters"]
            read[-1]["rope_parameters"] = {key: value for key, value in rope_parameters.items() if value is not None}
        ignored_keys = {"_name_or_path", "use_sliding_window", "sliding_window"}
        before = {key: value for key, value in read[0].items() if key not in ignored_keys}
        assert before == {key: read[1][key] for key in before}, rope


def exports(family: str) -> Iterator[dict[str, Any]]:
    """Configs of a tiny model's export, without and with the config that it came from."""
    config = tiny.config_of_family(family)
    spec = tiny.spec_of(config)
    for origin in (None, config):
        yield build_config(spec, origin, "bfloat16")


@pytest.mark.parametrize("family", sorted(EXPERTS))
def test_experts_are_counted_under_the_name_that_every_release_knows(family: str):
    for export in exports(family):
        if export["model_type"] == family:
            assert export[EXPERTS[family]] == 4
            assert not export.keys() & BY_TYPE[family].aliases.keys()


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_key_value_heads": 4}),
        ("deepseek_v2", {"scoring_func": "softmax", "topk_method": "group_limited_greedy", "norm_topk_prob": False}),
        ("minimax_m2", {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 4}),
    ],
)  # fmt: skip
def test_keys_that_vllm_would_assume_otherwise_are_written(family: str, expected: dict[str, Any]):
    """transformers 5 omits `scoring_func`, for which vLLM then assumes softmax, and `topk_method`, without which vLLM
    has no selection bias."""
    for export in exports(family):
        assert export.items() >= expected.items()


def test_a_window_that_no_layer_uses_is_switched_off():
    """transformers 4 does not read Qwen2-MoE's `layer_types`, and would window every layer."""
    config = tiny.config_of_family("qwen2_moe", max_window_layers=0)
    spec = tiny.spec_of(config)
    assert config["use_sliding_window"]
    assert spec.attention.window is None
    export = build_config(spec, config, "bfloat16")
    assert (export["use_sliding_window"], export["sliding_window"]) == (False, None)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("minimax_m2", {}, "minimax_m2"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "RoPE"),
        ("gpt_oss", {"swiglu_limit": 0.5}, "limit"),
        ("qwen2_moe", {}, "window"),
        ("granitemoehybrid", {}, "Mamba-2"),
        ("deepseek_v2", {"rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.5}}, "YaRN"),
    ],
)  # fmt: skip
def test_the_card_says_what_transformers_4_computes_otherwise(family: str, changes: dict[str, Any], reason: str):
    spec = tiny.spec_of(tiny.config_of_family(family, **changes))
    assert [reason in difference for difference in unlike_older(spec, BY_TYPE[family])] == [True]
    assert "not transformers 4" in readers(spec, BY_TYPE[family])


@pytest.mark.parametrize("family", ["bailing_moe", "bailing_moe_v2", "mistral4"])
def test_the_card_names_the_class_if_transformers_has_none_by_the_type(family: str):
    text = readers(tiny.spec_of(tiny.config_of_family(family)), BY_TYPE[family])
    assert BY_TYPE[family].architecture in text
    assert ("compared with 5" in text) == hasattr(transformers, BY_TYPE[family].architecture)
    others = tiny.CONFIGS.keys() - {"bailing_moe", "bailing_moe_v2", "mistral4"}
    assert all(AutoConfig.for_model(name).__class__ in MODEL_FOR_CAUSAL_LM_MAPPING for name in others)


def test_the_card_says_that_transformers_4_reads_all_else():
    for family in sorted(tiny.CONFIGS.keys() - {*UNKNOWN_TO_OLDER, "qwen2_moe", "granitemoehybrid"}):
        spec = tiny.spec_of(tiny.config_of_family(family))
        assert "not" not in readers(spec, BY_TYPE[family])
        assert "not on transformers 4" not in adapter_readers(spec, BY_TYPE[family], parameters=False)
        assert "not on transformers 4" in adapter_readers(spec, BY_TYPE[family], parameters=True)


def test_the_releases_on_the_card_are_those_that_were_compared():
    record = json.loads(Path("benchmarks/results/older_transformers.json").read_text())
    figures = record["figures"]
    assert (record["versions"]["transformers"], figures["transformers"]) == (CURRENT, OLDER)
    assert figures["peft"] == PEFT
    families = {row["family"] for row in figures["rows"]}
    compared = (tiny.CONFIGS.keys() - set(UNKNOWN_TO_OLDER)) | set(WRAPPERS_OF_OLDER)
    assert families == compared, "run python -m benchmarks.older_transformers FOLDER"
    for row in figures["rows"]:
        assert (max(row["apart"].values()) > 1e-8) == bool(row["reasons"]), row
