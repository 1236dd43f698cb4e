"""What a config says that is not supported, and a job's `from` filled in."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.interchange.config import describe_config, known_keys
from moe.interchange.expand import expand, expand_model
from moe.interchange.families import BY_TYPE
from moe.interchange.reading import Reading
from moe.spec import LanguageModelSpec, ProblemCode, SpecError, model_spec
from tests.interchange import tiny
from tests.refusals import check, refused, refused_for


def config(family: str, **over: Any) -> dict[str, Any]:
    return {"model_type": family, **tiny._BASE, **tiny.CONFIGS[family], **over}


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act"),
        ("mixtral", {"attention_dropout": 1.5}, "attention_dropout"),
        ("mixtral", {"output_router_logits": "yes"}, "output_router_logits"),
        ("mixtral", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("mixtral", {"quantization": {"bits": 4}}, "quantization"),
        ("llama", {"use_sliding_window": True}, "use_sliding_window"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ("mixtral", {"num_experts": 5}, "num_experts"),
        ("mixtral", {"per_layer_config": {"0": {}}}, "per_layer_config"),
        ("mixtral", {"quantum_gates": 3}, "quantum_gates"),
        ("mixtral", {"num_hidden_layers": "3"}, "num_hidden_layers"),
        ("mixtral", {"num_hidden_layers": True}, "num_hidden_layers"),
        ("mixtral", {"num_hidden_layers": 60_000_000}, "num_hidden_layers"),
        ("glm4_moe", {"partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ("mixtral", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ("qwen2_moe", {"layer_types": None, "max_window_layers": None}, "max_window_layers"),
        ("mixtral", {"rms_norm_eps": None}, "rms_norm_eps"),
        ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("mixtral", {"sliding_window": "all"}, "sliding_window"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
         "rope_scaling.rope_type"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}},
         "rope_parameters.beta_fast"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
        ("qwen2_moe", {"num_local_experts": 8}, "num_local_experts"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}, "layer_types"),
        ("qwen3_next", {"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("qwen3_next", {"layer_types": None, "full_attention_interval": 1}, "full_attention_interval"),
        ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_moe", {"decoder_sparse_step": 9}, "decoder_sparse_step"),
        ("qwen3_moe", {"mlp_only_layers": list(range(9))}, "mlp_only_layers"),
        ("deepseek_v3", {"first_k_dense_replace": 9}, "first_k_dense_replace"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm"),
        ("olmoe", {"sliding_window": 4}, "sliding_window"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(family: str, changes: dict[str, Any], key: str):
    with pytest.raises(SpecError) as raised:
        describe_config(config(family, **changes), "F/config.json")
    assert [problem.path for problem in raised.value.problems] == [f"F/config.json:{key}"]
    assert all(problem.remedy for problem in raised.value.problems)


@pytest.mark.parametrize(
    ("family", "changes", "code", "key"),
    [
        ("mixtral", {"hidden_act": "gelu"}, "unsupported", "hidden_act"),
        ("mixtral", {"num_experts": 5}, "conflict", "num_experts"),
        ("mixtral", {"quantum_gates": 3}, "unknown_key", "quantum_gates"),
        ("mixtral", {"num_hidden_layers": "3"}, "wrong_type", "num_hidden_layers"),
        ("mixtral", {"rms_norm_eps": 10**400}, "out_of_range", "rms_norm_eps"),
        ("mixtral", {"attention_dropout": 1.5}, "out_of_range", "attention_dropout"),
        ("mixtral", {"attention_dropout": "none"}, "wrong_type", "attention_dropout"),
        ("glm4_moe", {"partial_rotary_factor": "half"}, "wrong_type", "partial_rotary_factor"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, "out_of_range", "partial_rotary_factor"),
        ("llama", {"rope_parameters": [1]}, "wrong_type", "rope_parameters"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "missing", "rope_parameters.factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}}, "unknown_key",
         "rope_parameters.beta_fast"),
        ("llama", {"rope_parameters": {"beta_fast": 3.0}}, "not_applicable", "rope_parameters.beta_fast"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, "invalid_value", "layer_types"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}, "requires",
         "layer_types"),
        ("deepseek_v3", {"first_k_dense_replace": 9}, "out_of_range", "first_k_dense_replace"),
        ("deepseek_v3", {"n_shared_experts": 0}, "out_of_range", "n_shared_experts"),
    ],
)  # fmt: skip
def test_the_code_says_which_rule_a_key_breaks(family: str, changes: dict[str, Any], code: ProblemCode, key: str):
    with refused(code, f"c:{key}"):
        describe_config(config(family, **changes), "c")


def test_a_key_that_has_no_default_is_required():
    reading = Reading({"named": 3}, "c", {"with_default": 4}, {})
    assert (reading.get("named", int), reading.get("with_default", int)) == (3, 4)
    assert reading.get("other", int) is None
    check(reading.problems, [("missing", "c:other", None)])


@pytest.mark.parametrize(
    "cannot",
    [
        {"tie_word_embeddings": 3},
        {"vocab_size": -3, "rms_norm_eps": -1.0, "intermediate_size": 0},
        {"num_experts_per_tok": 99},
        {"num_local_experts": -1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
    ],
)
def test_what_a_config_cannot_be_is_told_by_its_own_key(tmp_path: Path, cannot: dict[str, Any]):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config("mixtral", **cannot)))
    with pytest.raises(SpecError) as raised:
        expand_model({"from": str(tmp_path)}, None)
    told = [problem.path.removeprefix(f"{path}:").split(", ") for problem in raised.value.problems]
    assert {key for keys in told for key in keys} >= cannot.keys()
    assert len(told) == len(cannot)
    assert all(problem.value in (*cannot.values(), -1.0) for problem in raised.value.problems)


def test_what_the_job_says_stands_in_place_of_what_a_config_cannot_be(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config("mixtral", rms_norm_eps=-1.0)))
    assert expand_model({"from": str(tmp_path), "norm_eps": 1e-5}, None)["norm_eps"] == 1e-5


def test_what_does_not_go_with_a_config_is_told_of_the_job(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config("mixtral")))
    model = expand_model({"from": str(tmp_path), "attention": {"num_heads": 7}}, None)
    with refused("not_divisible", "attention.num_kv_heads", 2):
        model_spec(model)


def test_all_that_is_wrong_is_told_at_once():
    with refused_for(
        [
            ("unsupported", "c:hidden_act", "relu"),
            ("unsupported", "c:mlp_bias", True),
            ("unknown_key", "c:brand_new", 1),
        ]
    ) as raised:
        describe_config(config("llama", mlp_bias=True, hidden_act="relu", brand_new=1), "c")
    assert [problem.path for problem in raised.value.problems] == ["c:hidden_act", "c:mlp_bias", "c:brand_new"]


def test_another_type_is_refused_with_those_there_are():
    for kind in ("gpt2", None, 3, ["llama"]):
        with refused("unsupported", "c:model_type"):
            describe_config({"model_type": kind}, "c")


HUB = {
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1,
        "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
        "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                         "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
    },
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
        "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1, "rope_scaling": None,
        "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304, "rms_norm_eps": 1e-05,
    },
}  # fmt: skip
"""Configs as they lie on the hub."""


@pytest.mark.parametrize("preset", sorted(HUB))
def test_the_hubs_configs_are_our_presets(preset: str):
    found = LanguageModelSpec(**describe_config(HUB[preset], "c").model_fields)
    known = model_spec({"preset": preset})
    assert isinstance(known, LanguageModelSpec)
    if known.moe is not None and found.moe is not None:
        assert found.moe.shared_hidden_dim == known.moe.shared_hidden_dim
    assert found.num_parameters() == known.num_parameters()
    assert found.attention == known.attention


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "root" / "model"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config("deepseek_v3")))
    return path


JOB: dict[str, Any] = {"name": "t", "data": {"corpus": "catalogs", "target": "en"}, "train": {"num_steps": 1}}


def test_from_fills_in_every_dimension_and_what_is_beside_it_wins(folder: Path):
    given_ = {"from": str(folder), "norm_eps": 1e-3, "moe": {"bias_update_rate": 0.001}}
    found = expand({**JOB, "model": given_}, [str(folder.parent)])
    assert {key: found[key] for key in JOB} == JOB
    spec = model_spec(found["model"])
    assert isinstance(spec, LanguageModelSpec)
    assert spec.moe is not None
    assert spec.from_folder == str(folder)
    assert spec.norm_eps == 1e-3
    assert spec.moe.bias_update_rate == 0.001
    assert spec.moe.num_experts == 4
    assert spec.moe.routing.has_selection_bias
    filled_in = spec.model_dump(mode="json")
    again = {**JOB, "model": filled_in}
    assert expand(again, [str(folder.parent)]) == again, "what is filled in already stays so"
    by_hand = {**JOB, "model": {**filled_in, "from_config": None}}
    assert expand(by_hand, []) == by_hand, "nor is anything looked up for what never was"


def test_what_one_folder_filled_in_does_not_go_with_another(folder: Path):
    """Stored specs whose `from` is changed by hand: tensors have the same shapes, and mean others."""
    filled_in = model_spec(expand_model({"from": str(folder)}, None)).model_dump(mode="json")
    other = folder.parent / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config("deepseek_v3", rms_norm_eps=1e-3)))
    with refused("changed", "model.from"):
        expand_model({**filled_in, "from": str(other)}, None)
    assert expand_model({"from": str(other)}, None)["norm_eps"] == 1e-3


def test_other_jobs_pass_unchanged():
    for model in ({"preset": "gshard-tiny"}, {"kind": "language"}, None, 3, {"from": 3}):
        assert expand({**JOB, "model": model}, []) == {**JOB, "model": model}
    assert expand(JOB, []) == JOB


def test_from_reads_nothing_outside_the_roots(folder: Path, tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    roots = [str(tmp_path / "root")]
    for outside in (tmp_path / "other", tmp_path / "root" / "link" / "other", "relative", "http://h/m",
                    tmp_path / "root" / ".." / "other"):  # fmt: skip
        with pytest.raises(SpecError) as raised:
            expand_model({"from": str(outside)}, roots)
        assert raised.value.problems[0].path == "model.from"


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"{", b'{"vocab_size": NaN}', b"[" * 100_000, b" " * (1 << 24) + b"{}"]
)
def test_a_config_that_is_no_object_is_refused(content: bytes, folder: Path):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(SpecError, match=r"config\.json"):
        expand_model({"from": str(folder)}, None)


def test_a_preset_beside_from_is_refused(folder: Path):
    with refused("conflict", "model.preset", "mixtral-8x7b"):
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


def test_expanding_loads_no_torch():
    heavy = "[name for name in ('torch', 'tokenizers') if name in sys.modules]"
    code = f"import sys, moe.interchange.expand; print({heavy})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
