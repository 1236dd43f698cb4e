"""Every family: their folder into our tensors and back, what its config means, and models of ours in their format."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from moe.interchange.config import build_config, describe_config, differences, meaning, new_config
from moe.interchange.families import BY_TYPE, FAMILIES
from moe.interchange.load import load_weights
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource
from moe.spec import LanguageModelSpec, SpecError, presets
from tests.grid import num_cases
from tests.interchange import tiny

NAMES = sorted(tiny.CONFIGS)
FOR_VLLM = {
    "mimo_v2_flash": {"rope_theta", "swa_rope_theta", "partial_rotary_factor", "hybrid_layer_pattern", "moe_layer_freq",
                      "swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim",
                      "layernorm_epsilon"},
}  # fmt: skip
"""Keys of exports that transformers 5 ignores and keeps."""
WHERE = ("_name_or_path", "transformers_version")


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A family's name, and a folder with a tiny model of it in both layouts."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.their_model(request.param)
    tiny.folder_of(model, folder / "hub")
    tiny.folder_of(model, folder / "fused", original=False)
    return request.param, folder


def load_model(folder: Path) -> tuple[LanguageModelSpec, torch.nn.Module]:
    spec = tiny.spec_of(tiny.config_of(folder))
    model = tiny.blank(spec)
    load_weights(str(folder), model, spec)
    return spec, model


@pytest.mark.sample(17)
@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_a_folder_comes_back_with_every_byte_in_the_hubs_layout(family: tuple[str, Path], layout: str, tmp_path: Path):
    """Our tensors themselves are compared by what they compute, in tests/language/test_families.py."""
    name, folder = family
    spec, model = load_model(folder / layout)
    origin = Origin.of_folder(str(folder / layout), spec)
    save_folder(spec, ModelSource(model), tmp_path / "out", origin=origin, max_shard_bytes=20_000)
    tiny.same_tensors(tiny.tensors_of(folder / "hub"), tiny.tensors_of(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    before, after = (AutoConfig.from_pretrained(path).to_dict() for path in (folder / layout, tmp_path / "out"))
    older_keys = {key: after[key] for key in after.keys() & FOR_VLLM.get(name, set())}
    assert after == {**BY_TYPE[name].constant_keys, **older_keys, **before, "_name_or_path": after["_name_or_path"]}


@pytest.mark.sample(6)
def test_a_folder_written_without_its_origin_has_the_same_logits(family: tuple[str, Path], tmp_path: Path):
    _, folder = family
    spec, model = load_model(folder / "hub")
    save_folder(spec, ModelSource(model), tmp_path / "new", dtype=torch.float32)
    as_float32 = {"dtype": torch.float32, "experts_implementation": "eager"}
    before = AutoModelForCausalLM.from_pretrained(folder / "hub", **as_float32)
    after, info = AutoModelForCausalLM.from_pretrained(tmp_path / "new", output_loading_info=True, **as_float32)
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(40).view(2, 20) % 48
    with torch.no_grad():
        expected, logits = (model.eval()(tokens, use_cache=False).logits for model in (before, after))
    assert torch.equal(expected, logits)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_of_nothing_but_its_type_means_what_transformers_takes_it_for(name: str):
    required_keys = {
        "deepseek_v2": {"num_experts_per_tok": 6},
        "glm4_moe": {"hidden_size": 12288},
        "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
        "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
        "gemma4_text": {"hidden_size_per_layer_input": 0},
        "bailing_moe": {"num_key_value_heads": 4, "moe_intermediate_size": 512, "use_bias": False},
    }.get(name, {})
    bare = LanguageModelSpec(**describe_config({"model_type": name, **required_keys}, "c").model_fields)
    full = AutoConfig.for_model(name, **required_keys).to_dict()
    assert meaning(bare) == meaning(LanguageModelSpec(**describe_config(full, "c").model_fields))


ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 3e4}, "rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                                         "mscale": 0.7, "mscale_all_dim": 0.7, "truncate": False}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
     "rope_scaling": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7e5}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}, "rope_scaling": {}},
    {"rope_scaling": {}},
    {"rope_parameters": {}, "rope_theta": 5e5},
]  # fmt: skip


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss", "glm4_moe"])
@pytest.mark.parametrize("rope", ROPES, ids=range(len(ROPES)))
def test_positions_are_read_as_transformers_reads_them(name: str, rope: dict[str, Any]):
    base = {key: value for key, value in {**tiny._BASE, **tiny.CONFIGS[name]}.items() if key != "rope_parameters"}
    config = AutoConfig.for_model(name, **base, **rope)
    rope_spec = tiny.spec_of({"model_type": name, **base, **rope}).attention.rope
    parameters = config.rope_parameters
    assert rope_spec.base == parameters["rope_theta"]
    assert rope_spec.fraction == parameters.get("partial_rotary_factor", 1.0)
    kind = parameters["rope_type"]
    assert (rope_spec.scaling.kind if rope_spec.scaling else "default") == kind
    if rope_spec.scaling is None:
        return
    for key, field in (("factor", "factor"), ("beta_fast", "beta_fast"), ("mscale", "mscale")):
        if parameters.get(key) is not None:
            assert getattr(rope_spec.scaling, field) == parameters[key]
    if kind in ("llama3", "yarn"):
        assert rope_spec.scaling.original_tokens == parameters["original_max_position_embeddings"]
    if kind == "dynamic":
        assert rope_spec.scaling.original_tokens == config.max_position_embeddings


def test_sarvams_name_of_yarn_is_read_as_transformers_reads_it():
    base = {**tiny._BASE, **tiny.CONFIGS["sarvam_mla"]}
    scaling = {"type": "deepseek_yarn", "factor": 40.0, "original_max_position_embeddings": 16, "mscale_all_dim": 0.7}
    as_published = {**base, "rope_theta": 3e4, "rope_scaling": scaling, "head_dim": 14, "q_head_dim": 10}
    read = AutoConfig.for_model("sarvam_mla", **as_published).to_dict()
    spec = tiny.spec_of({"model_type": "sarvam_mla", **as_published})
    assert meaning(spec) == meaning(tiny.spec_of(read))
    assert spec.attention.rope.scaling.kind == "yarn"


_NORM_EPS = {"lfm2_moe": "norm_eps", "nemotron_h": "layer_norm_epsilon"}


def _with_layer_types(config: dict[str, Any]) -> dict[str, Any]:
    """The config with as many types of layers as layers, if it has any."""
    number, keys = config["num_hidden_layers"], ("layer_types", "layers_block_type")
    return config | {key: (config[key] * number)[:number] for key in keys if config.get(key)}


def configs() -> st.SearchStrategy[dict[str, Any]]:
    """Random configs of any family, with keys of all kinds."""

    def configs_of(name: str) -> st.SearchStrategy[dict[str, Any]]:
        changes: dict[str, Any] = {
            "num_hidden_layers": st.integers(2, 6),
            "tie_word_embeddings": st.just(False) if name == "nemotron_h" else st.booleans(),
            _NORM_EPS.get(name, "rms_norm_eps"): st.sampled_from([1e-5, 1e-6]),
            "vocab_size": st.integers(8, 60),
        }
        known_keys = BY_TYPE[name].defaults
        for key in ("attention_bias", "qkv_bias", "norm_topk_prob", "use_qk_norm", "rope_interleave"):
            if key in known_keys and key not in BY_TYPE[name].only:
                changes[key] = st.booleans()
        if name in ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3", "qwen2", "mistral", "gemma3_text", "dots1"):
            changes["sliding_window"] = st.integers(1, 99)
        if "use_sliding_window" in known_keys:
            changes["use_sliding_window"] = st.booleans()
        if "max_window_layers" in known_keys:
            changes["max_window_layers"] = st.integers(-2, 7)
        if "mlp_only_layers" in known_keys or "decoder_sparse_step" in known_keys:
            changes["decoder_sparse_step"] = st.integers(1, 2)
            changes["mlp_only_layers"] = st.sampled_from([[], [0], [2], [0, 30]])
        if "mlp_layer_types" in tiny.CONFIGS[name]:
            types = st.lists(st.sampled_from(["dense", "sparse"]), min_size=2, max_size=2)
            changes |= {"num_hidden_layers": st.just(3), "mlp_layer_types": types.map(lambda first: [*first, "sparse"])}
        elif "first_k_dense_replace" in known_keys and name != "mimo_v2_flash":
            changes["first_k_dense_replace"] = st.integers(0, 1)
        if "q_lora_rank" in known_keys and "index_topk" not in known_keys:
            changes["q_lora_rank"] = st.sampled_from([None, 14])
        if name in ("qwen3_next", "qwen3_5_moe_text"):
            changes["full_attention_interval"] = st.integers(2, 3)
        if name == "granitemoeshared":
            changes["shared_intermediate_size"] = st.sampled_from([0, 12])
        if name == "mimo_v2_flash":
            changes |= {"sliding_window": st.integers(1, 99), "sliding_window_size": st.sampled_from([None, 5]),
                        "layer_types": st.none() | st.just(["full_attention", "sliding_attention"]),
                        "attention_value_scale": st.sampled_from([None, 0.5])}  # fmt: skip
        if name == "gemma3_text":
            changes |= {"layer_types": st.none(), "sliding_window_pattern": st.integers(1, 4),
                        "query_pre_attn_scalar": st.integers(1, 300), "rope_parameters": st.none(),
                        "rope_theta": st.sampled_from([1e5, 1e6]), "rope_local_base_freq": st.sampled_from([1e3, 1e4]),
                        "rope_scaling": st.sampled_from([None, {"rope_type": "linear", "factor": 8.0}])}  # fmt: skip
        if name == "gemma4_text":
            changes |= {"global_head_dim": st.sampled_from([8, 12]), "sliding_window": st.integers(1, 9),
                        "num_global_key_value_heads": st.sampled_from([None, 1, 4]),
                        "enable_moe_block": st.booleans(), "final_logit_softcapping": st.sampled_from([None, 5.0]),
                        "use_bidirectional_attention": st.sampled_from([None, "vision"])}  # fmt: skip
        if name == "llama4_text":  # a list would have to follow the number of layers
            changes |= {"no_rope_layers": st.just([]), "no_rope_layer_interval": st.integers(1, 4)}
        if name == "olmoe":
            changes["clip_qkv"] = st.sampled_from([None, 4.0])
        base = {"model_type": name, **tiny._BASE, **tiny.CONFIGS[name]}
        return st.fixed_dictionaries(changes).map(lambda values: _with_layer_types({**base, **values}))

    return st.sampled_from(NAMES).flatmap(configs_of)


@given(configs())
@settings(max_examples=num_cases(60), suppress_health_check=[HealthCheck.too_slow])
def test_any_config_means_what_transformers_writes_of_it_and_comes_back(config: dict[str, Any]):
    name = config["model_type"]
    spec = tiny.spec_of(config)
    rest = {key: value for key, value in config.items() if key != "model_type"}
    full = AutoConfig.for_model(name, **rest).to_dict()
    assert meaning(tiny.spec_of(full)) == meaning(spec)
    second_config = new_config(spec, BY_TYPE[name], "bfloat16")
    assert list(differences(spec, second_config)) == []
    keys = {key: value for key, value in second_config.items() if key not in ("model_type", "architectures", "dtype")}
    round_trip = AutoConfig.for_model(name, **keys).to_dict()
    assert meaning(tiny.spec_of(round_trip)) == meaning(spec)


@pytest.mark.parametrize(
    ("preset", "model_type"),
    [
        ("mixtral-8x7b", "mixtral"), ("qwen3-30b-a3b", "qwen3_moe"), ("olmoe-1b-7b", "olmoe"),
        ("gpt-oss-20b", "gpt_oss"), ("deepseek-v2", "deepseek_v2"), ("deepseek-v3", "deepseek_v3"),
        ("kimi-k2", "deepseek_v3"),
        ("mimo-v2-flash", "mimo_v2_flash"),
        ("qwen3-next-80b-a3b", "qwen3_next"), ("qwen3.5-35b-a3b", "qwen3_5_moe_text"),
        ("deepseek-v3.2", "deepseek_v32"), ("glm-5", "glm_moe_dsa"), ("glm-5.2", "glm_moe_dsa"),
        ("lfm2-8b-a1b", "lfm2_moe"), ("granite-4.0-h-tiny", "granitemoehybrid"),
        ("nemotron-3-nano-30b-a3b", "nemotron_h"), ("gemma-4-26b-a4b", "gemma4_text"), ("phi-3.5-moe", "phimoe"),
        ("flexolmo-7x7b", "flex_olmo"),
    ],
)  # fmt: skip
def test_published_models_have_a_family(preset: str, model_type: str):
    assert build_config(presets.load(preset), None, "bfloat16")["model_type"] == model_type


@pytest.mark.parametrize(
    ("preset", "name", "changes"),
    [
        ("dots.llm1", "dots1", {
            "hidden_size": 4096, "first_k_dense_replace": 1, "n_routed_experts": 128, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_theta": 1e7,
            "rms_norm_eps": 1e-5,
        }),
        ("ling-mini-2.0", "bailing_moe_v2", {"partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5}),
        ("ling-lite", "bailing_moe", {
            "architectures": ["BailingMoeForCausalLM"], "first_k_dense_replace": 0, "hidden_size": 2048,
            "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts": 64, "num_shared_experts": 2,
            "norm_topk_prob": True, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 6e5,
            "tie_word_embeddings": False, "use_bias": False, "use_qkv_bias": False, "vocab_size": 126_464,
            "norm_head": True, "norm_softmax": False, "embedding_dropout": 0.1, "pretraining_tp": 1,
        }),
        ("sarvam-30b", "sarvam_moe", {}),
        ("sarvam-105b", "sarvam_mla", {"rope_scaling": {
            "type": "deepseek_yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }}),
        ("flexolmo-7x7b", "flex_olmo", {}),
        ("mistral-7b", "mistral", {
            "vocab_size": 32_768, "sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        }),
        ("qwen2.5-7b", "qwen2", {
            "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "rope_theta": 1e6,
        }),
        ("gemma-3-1b", "gemma3_text", {
            "vocab_size": 262_144, "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
            "num_key_value_heads": 1, "sliding_window": 512,
        }),
    ],
)  # fmt: skip
def test_a_preset_means_what_its_config_does(preset: str, name: str, changes: dict[str, Any]):
    assert meaning(presets.load(preset)) == meaning(tiny.spec_of({"model_type": name, **changes}))


def test_a_model_that_no_family_has_is_refused_with_all_reasons():
    spec = tiny.spec_of({"model_type": "mixtral", **tiny._BASE, **tiny.CONFIGS["mixtral"]})
    changed_spec = LanguageModelSpec(**{**spec.model_dump(), "embedding_multiplier": 3.0, "norm_eps": 1e-3})
    with pytest.raises(SpecError) as error:
        build_config(changed_spec, None, "bfloat16")
    problems = error.value.problems
    assert len(problems) == 1 + len(FAMILIES)
    assert problems[1].value == "mixtral"
    assert "embedding_multiplier (=3.0) would be 1.0" in problems[1].rule
    assert "norm_eps" not in problems[1].rule, "which it can say"


@pytest.mark.parametrize("name", ["gemma3_text", "gemma4_text", "mimo_v2_flash", "exaone_moe", "flint", "mellum"])
def test_a_model_without_windows_has_a_window_that_no_layer_uses(name: str):
    config = {"model_type": name, **tiny._BASE, **tiny.CONFIGS[name], "layer_types": ["full_attention"] * 3}
    spec = tiny.spec_of(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**new_config(spec, BY_TYPE[name], "float32")))
    model(torch.tensor([[1, 2, 3]]))  # Gemma 3 refuses a null window here
    assert meaning(tiny.spec_of(model.config.to_dict())) == meaning(spec)


@pytest.mark.parametrize("name", ["gemma3_text", "gemma4_text", "mimo_v2_flash", "mellum"])
def test_rope_beside_from_changes_no_heads_of_a_model_without_windows(name: str):
    config = {"model_type": name, **tiny._BASE, **tiny.CONFIGS[name], "layer_types": ["full_attention"] * 3}
    spec = tiny.spec_of(config)
    rope = spec.attention.rope.model_copy(update={"base": 777.0})
    changed_spec = spec.model_copy(update={"attention": spec.attention.model_copy(update={"rope": rope})})
    export = build_config(changed_spec, config, "float32")
    assert meaning(tiny.spec_of(export)) == meaning(changed_spec)
    assert export["num_attention_heads"] == config["num_attention_heads"]


def test_what_was_written_beside_from_is_in_the_config_of_an_export():
    config = tiny.config_of_family("qwen3_moe")
    spec = tiny.spec_of(config, norm_eps=1e-3)
    export_config = build_config(spec, config, "float32")
    assert export_config["rms_norm_eps"] == 1e-3
    assert export_config["dtype"] == "float32"
    shared_keys = config.keys() & export_config.keys()
    assert {key for key in shared_keys if config[key] != export_config[key]} == {"rms_norm_eps", "dtype"}
    assert config.keys() - export_config.keys() == {"num_local_experts"}, "which transformers 4 calls num_experts"
