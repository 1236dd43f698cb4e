"""Unsupported keys of a config, and a job's `from` filled in."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from moe.interchange.config import build_config, describe_config, known_keys
from moe.interchange.expand import expand, expand_model
from moe.interchange.families import BY_TYPE
from moe.interchange.missing_features import missing_features
from moe.interchange.reading import Reading
from moe.spec import LanguageModelSpec, ProblemCode, SpecError, model_spec
from tests.interchange import tiny
from tests.refusals import check, expect_problem, expect_problems


def config(family: str, **overrides: Any) -> dict[str, Any]:
    return {"model_type": family, **tiny._BASE, **tiny.CONFIGS[family], **overrides}


REFUSALS: list[tuple[ProblemCode, str, dict[str, Any], str]] = [
    ("conflict", "mixtral", {"num_experts": 5}, "num_experts"),
    ("invalid_value", "gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
     "rope_parameters"),
    ("invalid_value", "qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ("mismatch", "mimo_v2_flash", {"hybrid_layer_pattern": [0, 1, 0]}, "hybrid_layer_pattern"),
    ("mismatch", "mimo_v2_flash", {"swa_num_key_value_heads": 2}, "swa_num_key_value_heads"),
    ("missing", "llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor"),
    ("not_applicable", "llama", {"rope_parameters": {"beta_fast": 3.0}}, "rope_parameters.beta_fast"),
    ("out_of_range", "deepseek_v3", {"first_k_dense_replace": 9}, "first_k_dense_replace"),
    ("out_of_range", "deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts"),
    ("out_of_range", "glm4_moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ("out_of_range", "mixtral", {"attention_dropout": 1.5}, "attention_dropout"),
    ("out_of_range", "mixtral", {"num_hidden_layers": 60_000_000}, "num_hidden_layers"),
    ("out_of_range", "mixtral", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ("requires", "qwen2_moe", {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}, "layer_types"),
    ("unknown_key", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}},
     "rope_parameters.beta_fast"),
    ("unknown_key", "mixtral", {"quantization": {"bits": 4}}, "quantization"),
    ("unknown_key", "mixtral", {"quantum_gates": 3}, "quantum_gates"),
    ("unknown_key", "qwen2_moe", {"num_local_experts": 8}, "num_local_experts"),
    ("unsupported", "deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("unsupported", "deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
    ("unsupported", "deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("unsupported", "deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("unsupported", "gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("unsupported", "gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("unsupported", "gemma3_text", {"hidden_activation": "silu"}, "hidden_activation"),
    ("unsupported", "gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("unsupported", "llama", {"use_sliding_window": True}, "use_sliding_window"),
    ("unsupported", "llama", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ("unsupported", "llama", {"mlp_bias": True}, "mlp_bias"),
    ("unsupported", "llama", {"rope_parameters": None, "rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
     "rope_scaling.rope_type"),
    ("unsupported", "llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
     "rope_parameters.full_attention"),
    ("unsupported", "minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list"),
    ("unsupported", "minimax_m2", {"use_qk_norm": False}, "use_qk_norm"),
    ("unsupported", "mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("unsupported", "mixtral", {"hidden_act": "gelu"}, "hidden_act"),
    ("unsupported", "mixtral", {"output_router_logits": "yes"}, "output_router_logits"),
    ("unsupported", "mixtral", {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ("unsupported", "mixtral", {"per_layer_config": {"0": {}}}, "per_layer_config"),
    ("unsupported", "mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("unsupported", "olmoe", {"sliding_window": 4}, "sliding_window"),
    ("unsupported", "qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
    ("unsupported", "qwen3_moe", {"decoder_sparse_step": 9}, "decoder_sparse_step"),
    ("unsupported", "qwen3_moe", {"mlp_only_layers": list(range(9))}, "mlp_only_layers"),
    ("unsupported", "qwen3_next", {"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types"),
    ("unsupported", "qwen3_next", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ("unsupported", "qwen3_next", {"layer_types": None, "full_attention_interval": 1}, "full_attention_interval"),
    ("unsupported", "qwen3_next", {"use_sliding_window": True}, "use_sliding_window"),
    ("unsupported", "bailing_moe", {"architectures": ["BailingMoeLinearForCausalLM"]}, "architectures"),
    ("unsupported", "bailing_moe", {"use_bias": True}, "use_bias"),
    ("unsupported", "bailing_moe_v2", {"norm_head": True}, "norm_head"),
    ("conflict", "glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace"),
    ("unsupported", "glm4_moe_lite", {"mlp_layer_types": None, "first_k_dense_replace": 2}, "first_k_dense_replace"),
    ("unsupported", "hunyuan_v1_moe", {"moe_topk": [2, 1, 2]}, "moe_topk"),
    ("unsupported", "hunyuan_v1_moe", {"moe_intermediate_size": [12, 12, 16]}, "moe_intermediate_size"),
    ("unsupported", "mistral4", {"n_group": 2}, "n_group"),
    ("wrong_type", "exaone_moe", {"layer_types": ["full_attention"] * 3, "sliding_window": None}, "sliding_window"),
    ("out_of_range", "ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval"),
    ("wrong_type", "deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok"),
    ("wrong_type", "gemma3_text", {"rope_scaling": 8}, "rope_scaling"),
    ("wrong_type", "glm4_moe", {"partial_rotary_factor": "half"}, "partial_rotary_factor"),
    ("wrong_type", "llama", {"rope_parameters": [1]}, "rope_parameters"),
    ("wrong_type", "mixtral", {"num_hidden_layers": "3"}, "num_hidden_layers"),
    ("wrong_type", "mixtral", {"num_hidden_layers": True}, "num_hidden_layers"),
    ("wrong_type", "mixtral", {"rms_norm_eps": None}, "rms_norm_eps"),
    ("wrong_type", "mixtral", {"sliding_window": "all"}, "sliding_window"),
    ("wrong_type", "mixtral", {"attention_dropout": "none"}, "attention_dropout"),
    ("wrong_type", "qwen2_moe", {"layer_types": None, "max_window_layers": None}, "max_window_layers"),
    ("conflict", "sarvam_mla", {"n_routed_experts": None, "num_local_experts": 4, "num_experts": 8}, "num_experts"),
    ("invalid_value", "llama", {"layer_types": ["full_attention"]}, "layer_types"),
    ("not_applicable", "gemma3_text", {"rope_parameters": {"full_attention": {
        "rope_type": "yarn", "factor": 4.0, "truncate": False}}}, "rope_parameters.full_attention.truncate"),
    ("not_applicable", "gemma3_text", {"rope_parameters": None, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "truncate": None}}, "rope_scaling.truncate"),
    ("not_applicable", "mimo_v2_flash", {"rope_parameters": {"sliding_attention": {
        "rope_type": "yarn", "factor": 4.0, "truncate": False}}}, "rope_parameters.sliding_attention.truncate"),
    ("out_of_range", "hunyuan_v1_moe", {"rope_parameters": {"rope_type": "dynamic", "alpha": 1e308}},
     "rope_parameters.alpha"),
    ("out_of_range", "hunyuan_v1_moe", {"rope_parameters": {"rope_type": "dynamic", "alpha": float("nan")}},
     "rope_parameters.alpha"),
    ("out_of_range", "minimax_m2", {"rotary_dim": 9, "rope_parameters": {}}, "rotary_dim"),
    ("out_of_range", "minimax_m2", {"rotary_dim": 0, "rope_parameters": {}}, "rotary_dim"),
    ("unknown_key", "deepseek_v3", {"quantization_config": {"quant_method": "fp8", "zero_points": True}},
     "quantization_config.zero_points"),
    ("unknown_key", "gpt_oss", {"quantization_config": {"quant_method": "mxfp4", "zero_points": True}},
     "quantization_config.zero_points"),
    ("unsupported", "mistral4", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type"),
    *(
        ("unsupported", "mistral4", {"rope_parameters": None, "partial_rotary_factor": fraction},
         "partial_rotary_factor")
        for fraction in (float("nan"), float("inf"), 1e308)
    ),
    ("invalid_value", "llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ("invalid_value", "llama4_text", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ("missing", "llama4_text", {"layer_types": ["chunked_attention"] * 3, "attention_chunk_size": None},
     "attention_chunk_size"),
    ("out_of_range", "llama4_text", {"no_rope_layers": [], "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ("out_of_range", "llama4_text", {"moe_layers": None, "interleave_moe_layer_step": 0}, "interleave_moe_layer_step"),
    ("wrong_type", "llama4_text", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning"),
    ("wrong_type", "llama4_text", {"moe_layers": [0.5]}, "moe_layers"),
    ("conflict", "gemma4_text", {"per_layer_config": {"2": {"head_dim": 8, "num_key_value_heads": 1}}},
     "global_head_dim"),
    ("invalid_value", "gemma4_text", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ("missing", "gemma4_text", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
     "rope_parameters.sliding_attention"),
    ("missing", "gemma4_text", {"rope_parameters": {"full_attention": {"rope_type": "proportional"},
                                                    "sliding_attention": {"rope_theta": 1e4}}},
     "rope_parameters.full_attention.rope_theta"),
    ("not_applicable", "gemma4_text", {"attention_k_eq_v": False}, "num_global_key_value_heads"),
    ("unknown_key", "gemma4_text", {"rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "beta_fast": 3.0},
        "sliding_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention.beta_fast"),
    ("unknown_key", "gemma4_text", {"rope_theta": 1e4}, "rope_theta"),
    ("unsupported", "gemma4_text", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input"),
    ("unsupported", "gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
    ("unsupported", "gemma4_text", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
    ("unsupported", "gemma4_text", {"per_layer_config": {"2": {"hidden_size": 4}}}, "per_layer_config"),
    ("unsupported", "gemma4_text", {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_theta": 1e4}}}, "partial_rotary_factor"),
    ("unsupported", "gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("wrong_type", "gemma4_text", {"per_layer_config": [8]}, "per_layer_config"),
]  # fmt: skip
"""(code, family, changes of a tiny model's config, key that the problem names)"""


@pytest.mark.parametrize(("code", "family", "changes", "key"), REFUSALS)
def test_unsupported_keys_are_refused(code: ProblemCode, family: str, changes: dict[str, Any], key: str):
    with expect_problem(code, f"c:{key}"):
        describe_config(config(family, **changes), "c")


@pytest.mark.parametrize("family", ["mixtral", "sarvam_mla"])
def test_a_null_alias_is_ignored(family: str):
    with_alias = config(family, num_experts=None)
    spec = tiny.spec_of(with_alias)
    assert spec == tiny.spec_of(config(family))
    changed_spec = spec.model_copy(update={"norm_eps": 1e-3})
    assert tiny.spec_of(build_config(changed_spec, with_alias, "float32")) == changed_spec


def test_head_dim_of_glm_4_7_flash_is_what_transformers_takes_it_for():
    keys = {key: value for key, value in config("glm4_moe_lite", head_dim=8).items() if key != "qk_rope_head_dim"}
    assert tiny.spec_of(keys).attention.rope_dim == AutoConfig.for_model(**keys).qk_rope_head_dim == 8


def test_types_of_feed_forward_layers_that_are_no_list_are_refused():
    with expect_problem("invalid_value", "c:mlp_layer_types"):
        describe_config(config("mimo_v2_flash", mlp_layer_types=0.5), "c")


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("minimax_m2", {"rotary_dim": 10**400, "rope_parameters": {}}, "c:rotary_dim"),
        ("mistral4", {"qk_rope_head_dim": 10**400, "rope_parameters": None, "partial_rotary_factor": 0.25},
         "c:partial_rotary_factor"),
        ("hunyuan_v1_moe", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10**400, "alpha": 2.0}},
         "c:rope_parameters.alpha"),
    ],
)  # fmt: skip
def test_numbers_beyond_floats_are_refused(family: str, changes: dict[str, Any], key: str):
    with pytest.raises(SpecError, match=key):
        describe_config(config(family, **changes), "c")


def test_a_key_that_has_no_default_is_required():
    reading = Reading({"named": 3}, lambda key: f"c:{key}", {"with_default": 4}, {})
    assert (reading.get("named", int), reading.get("with_default", int)) == (3, 4)
    assert reading.get("other", int) is None
    check(reading.problems, [("missing", "c:other", None)])


@pytest.mark.parametrize(
    "cannot",
    [
        {"tie_word_embeddings": 3}, {"vocab_size": -3, "rms_norm_eps": -1.0, "intermediate_size": 0},
        {"num_experts_per_tok": 99}, {"num_local_experts": -1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
    ],
)  # fmt: skip
def test_impossible_values_of_a_config_are_named_by_its_own_keys(tmp_path: Path, cannot: dict[str, Any]):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config("mixtral", **cannot)))
    with pytest.raises(SpecError) as error:
        expand_model({"from": str(tmp_path)}, None)
    key_lists = [problem.path.removeprefix(f"{path}:").split(", ") for problem in error.value.problems]
    assert {key for keys in key_lists for key in keys} >= cannot.keys()
    assert len(key_lists) == len(cannot)
    assert all(problem.value in (*cannot.values(), -1.0) for problem in error.value.problems)


def test_an_impossible_rotary_embedding_is_named_by_its_own_keys(tmp_path: Path):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334}
    by_type = {"full_attention": rope, "sliding_attention": {**rope, "partial_rotary_factor": 0.5}}
    (tmp_path / "config.json").write_text(json.dumps(config("mimo_v2_flash", rope_parameters=by_type)))
    with expect_problem("not_divisible", f"{tmp_path}/config.json:max_position_embeddings, rope_parameters"):
        expand_model({"from": str(tmp_path)}, None)


def test_fields_of_the_job_replace_those_of_the_config(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config("mixtral", rms_norm_eps=-1.0)))
    assert expand_model({"from": str(tmp_path), "norm_eps": 1e-5}, None)["norm_eps"] == 1e-5
    model = expand_model({"from": str(tmp_path), "norm_eps": 1e-5, "attention": {"num_heads": 7}}, None)
    with expect_problem("not_divisible", "attention.num_kv_heads", 2):
        model_spec(model)


def test_all_problems_of_a_config_are_reported_at_once():
    keys = {"hidden_act": ("unsupported", "relu"), "mlp_bias": ("unsupported", True), "brand_new": ("unknown_key", 1)}
    with expect_problems([(code, f"c:{key}", value) for key, (code, value) in keys.items()]):
        describe_config(config("llama", **{key: value for key, (_, value) in keys.items()}), "c")


@pytest.mark.parametrize("kind", ["gpt2", None, 3, ["llama"]])
def test_another_model_type_is_refused(kind: Any):
    with expect_problem("unsupported", "c:model_type"):
        describe_config({"model_type": kind}, "c")


@pytest.mark.parametrize(
    ("keys", "features"),
    [
        ({"mamba_dt_rank": 16}, ["Mamba-1 layers (`mamba_dt_rank`)"]),
        ({"mamba_dt_rank": 0, "index_topk": None, "num_attention_heads_per_layer": [4, 4]}, []),
        ({"vision_config": {"hidden_size": 8}, "text_config": {"mamba_dt_rank": 16}},
         ["a vision part (`vision_config`)", "Mamba-1 layers (`text_config.mamba_dt_rank`)"]),
        ({"alibi": True, "num_attention_heads_per_layer": [4, 8]},
         ["numbers of heads by layer (`num_attention_heads_per_layer`)", "ALiBi (`alibi`)"]),
        ({"layer_rope_theta": [1e4, 1e6]}, ["rotary positions by layer (`layer_rope_theta`)"]),
        ({"rope_scaling": {"mrope_section": [1, 1]}},
         ["rotary positions in several dimensions (`rope_scaling.mrope_section`)"]),
        ({"hidden_activation": "gelu", "mlp_hidden_act": "relu", "hidden_act": "silu"},
         ["GELU (`hidden_activation`)", "ReLU (`mlp_hidden_act`)"]),
        ({"thinker_config": {"vision_config": {"depth": 2}}, "talker_config": {"text_config": {}}},
         ["a vision part (`thinker_config.vision_config`)", "a part that speaks (`talker_config`)"]),
        ({"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
         ["linear attention beside sliding windows (`layer_types`)"]),
        ({"layer_types": ["linear_attention", "full_attention"]}, []),
        ({"layer_types": ["indexed_attention", "sliding_attention"]},
         ["sparse attention beside sliding windows (`layer_types`)"]),
        ({"text_config": 3, "rope_parameters": "none", "mlp_layer_types": ["dense", "hash_moe"]},
         ["routing by a hash of the token (`mlp_layer_types`)"]),
    ],
)  # fmt: skip
def test_a_config_of_an_unknown_family_says_what_is_missing(keys: dict[str, Any], features: list[str]):
    assert list(missing_features(keys)) == features
    with expect_problem("unsupported", "c:model_type", "new") as error:
        describe_config({"model_type": "new", **keys}, "c")
    assert all(feature in error.value.problems[0].rule for feature in features)


@pytest.mark.parametrize(
    ("model_type", "features"),
    [
        ("axk1", ["a norm of the experts' sum in layers with experts alone"]),
        ("beam", ["gates of attention heads", "factors of residuals by depth"]),
        ("dbrx", ["LayerNorm other than Phi-3.5-MoE's"]),
        ("kolibri1", ["a selection bias of router logits"]),
    ],
)
def test_features_that_no_key_shows_are_known_by_the_type(model_type: str, features: list[str]):
    with expect_problem("unsupported", "c:model_type", model_type) as error:
        describe_config({"model_type": model_type, "hidden_size": 8}, "c")
    missing = ", ".join(f"{feature} (`model_type`)" for feature in features)
    assert error.value.problems[0].rule.endswith(f"; missing here: {missing}")


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_supported_families_miss_nothing(family: str):
    """A feature that became supported is deleted from `missing_features.FEATURES`."""
    written_config = tiny.config_of_family(family)
    assert list(missing_features(written_config)) == []
    with expect_problem("unsupported", "c:model_type", "new") as error:
        describe_config({**written_config, "model_type": "new"}, "c")
    nearest = error.value.problems[0].rule.rpartition("the nearest family is ")[2]
    assert nearest == family or written_config.keys() <= known_keys(BY_TYPE[nearest])


HUB = json.loads((Path(__file__).parent / "hub_configs.json").read_text())
"""Configs as published on the hub."""


@pytest.mark.parametrize("preset", sorted(HUB))
def test_the_hubs_configs_are_our_presets(preset: str):
    hub_spec, preset_spec = (
        LanguageModelSpec(**describe_config(HUB[preset], "c").model_fields),
        model_spec({"preset": preset}),
    )
    assert hub_spec.moe.shared_hidden_dim == preset_spec.moe.shared_hidden_dim
    assert hub_spec.num_parameters() == preset_spec.num_parameters()
    assert hub_spec.attention == preset_spec.attention
    assert hub_spec.local_attention == preset_spec.local_attention


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "root" / "model"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config("deepseek_v3")))
    return path


JOB: dict[str, Any] = {"name": "t", "data": {"corpus": "catalogs", "target": "en"}, "train": {"num_steps": 1}}


def test_from_fills_in_every_dimension_and_fields_beside_it_win(folder: Path):
    model = {"from": str(folder), "norm_eps": 1e-3, "moe": {"bias_update_rate": 0.001}}
    expanded_job = expand({**JOB, "model": model}, [str(folder.parent)])
    assert {key: expanded_job[key] for key in JOB} == JOB
    spec = model_spec(expanded_job["model"])
    assert (spec.from_folder, spec.norm_eps) == (str(folder), 1e-3)
    assert (spec.moe.bias_update_rate, spec.moe.num_experts, spec.moe.routing.has_selection_bias) == (0.001, 4, True)
    filled_in = spec.model_dump(mode="json")
    second_job = {**JOB, "model": filled_in}
    assert expand(second_job, [str(folder.parent)]) == second_job
    by_hand = {**JOB, "model": {**filled_in, "from_config": None}}
    assert expand(by_hand, []) == by_hand, "nothing is looked up"


def test_fields_that_one_folder_filled_in_are_refused_with_another(folder: Path):
    """Stored specs whose `from` is changed by hand: tensors have the same shapes, and another meaning."""
    filled_in = model_spec(expand_model({"from": str(folder)}, None)).model_dump(mode="json")
    other_folder = folder.parent / "other"
    other_folder.mkdir()
    (other_folder / "config.json").write_text(json.dumps(config("deepseek_v3", rms_norm_eps=1e-3)))
    with expect_problem("changed", "model.from"):
        expand_model({**filled_in, "from": str(other_folder)}, None)
    assert expand_model({"from": str(other_folder)}, None)["norm_eps"] == 1e-3


def test_other_jobs_pass_unchanged():
    for model in ({"preset": "gshard-tiny"}, {"kind": "language"}, None, 3, {"from": 3}):
        assert expand({**JOB, "model": model}, []) == {**JOB, "model": model}
    assert expand(JOB, []) == JOB


def test_from_reads_nothing_outside_the_roots(folder: Path, tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    roots = [str(tmp_path / "root")]
    for path in (tmp_path / "other", tmp_path / "root" / "link" / "other", "relative", "http://h/m",
                    tmp_path / "root" / ".." / "other"):  # fmt: skip
        with pytest.raises(SpecError) as error:
            expand_model({"from": str(path)}, roots)
        assert error.value.problems[0].path == "model.from"


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"{", b'{"vocab_size": NaN}', b"[" * 100_000, b" " * (1 << 24) + b"{}"]
)
def test_a_config_that_is_no_object_is_refused(content: bytes, folder: Path):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(SpecError, match=r"config\.json"):
        expand_model({"from": str(folder)}, None)


def test_a_preset_beside_from_is_refused(folder: Path):
    with expect_problem("conflict", "model.preset", "mixtral-8x7b"):
        expand_model({"from": str(folder), "preset": "mixtral-8x7b"}, None)


_PLAIN = (st.none() | st.booleans() | st.integers() | st.integers(0, 9) | st.sampled_from([10**400, 6 * 10**7, -1])
          | st.floats() | st.text(max_size=5))  # fmt: skip
_ROPE = st.sampled_from(["rope_type", "rope_theta", "factor", "partial_rotary_factor", "x"])
_KINDS = st.sampled_from(["yarn", "linear", "dynamic", "llama3"])
_VALUES = _PLAIN | st.lists(_PLAIN, max_size=2) | st.dictionaries(_ROPE, _PLAIN | _KINDS, max_size=3)


@given(st.sampled_from(sorted(tiny.CONFIGS)), st.data())
def test_whatever_a_config_says_is_read_or_refused(family: str, data: st.DataObject):
    keys = st.sampled_from(sorted(known_keys(BY_TYPE[family])))
    changes = data.draw(st.dictionaries(keys, _VALUES, min_size=1, max_size=4))
    with suppress(SpecError):
        LanguageModelSpec(**describe_config({**config(family), **changes}, "c").model_fields)
