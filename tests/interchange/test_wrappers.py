"""Multimodal models: their language model is read and written, everything else comes back as it was."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe.export.hub import save_checkpoint_as_folder
from moe.interchange.config import build_config, describe_config, family_of, meaning
from moe.interchange.expand import expand, expand_model
from moe.interchange.load import load_weights
from moe.interchange.origin import Origin
from moe.interchange.releases import CURRENT, OLDER, WRAPPERS_OF_OLDER, adapter_readers, readers
from moe.interchange.rope import picture_positions
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource
from moe.plan import Cluster, plan_job
from moe.spec import JobSpec, LanguageModelSpec, ProblemCode
from tests.interchange import tiny
from tests.interchange.test_configs import HUB
from tests.interchange.test_jobs import further, stored_in, with_adapter, with_tiktoken
from tests.language.model_pairs import write_theirs
from tests.refusals import expect_problem
from tests.unit.train_runs import run

_VISION: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "patch_size": 2}
_QWEN_VISION = {**_VISION, "depth": 1, "num_heads": 2, "num_position_embeddings": 4, "out_hidden_size": 24}
_OTHER_VISION = {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2}
WRAPPERS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": {
        "text_config": {**tiny._BASE, **tiny.CONFIGS["qwen3_5_moe_text"], "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True}},
        "vision_config": _QWEN_VISION,
    },
    "qwen3_vl_moe": {
        "text_config": {**tiny._BASE, **tiny.CONFIGS["qwen3_moe"], "moe_intermediate_size": 14,
                        "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}},
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}, "tie_word_embeddings": False,
    },
    "glm4v_moe": {
        "text_config": {**tiny._BASE, **tiny.CONFIGS["glm4_moe"], "use_qk_norm": False, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 0, 0]}},
        "vision_config": {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 24, "image_size": 8},
    },
    "kimi_k25": {
        "text_config": {**tiny._BASE, **tiny.CONFIGS["deepseek_v3"], "num_nextn_predict_layers": 0,
                        "model_type": "deepseek_v3"},
        "vision_config": _OTHER_VISION, "tie_word_embeddings": False,
    },
    "gemma3": {
        "text_config": {**tiny._BASE, **tiny.CONFIGS["gemma3_text"]}, "mm_tokens_per_image": 4,
        "vision_config": {**_OTHER_VISION, "model_type": "siglip_vision_model", "image_size": 8},
    },
    "llama4": {
        "text_config": {**tiny._BASE, **tiny.CONFIGS["llama4_text"]}, "tie_word_embeddings": False,
        "vision_config": {**_OTHER_VISION, "image_size": 8, "vision_output_dim": 8, "projector_input_dim": 8,
                          "projector_output_dim": 8},
    },
    "gemma4": {
        "text_config": {**tiny._BASE, **tiny.CONFIGS["gemma4_text"], "use_bidirectional_attention": "vision"},
        "vision_config": {**_OTHER_VISION, "num_key_value_heads": 2, "head_dim": 4, "position_embedding_size": 8},
        "audio_config": None,
    },
    "mistral3": {
        "text_config": {**tiny._BASE, **tiny.CONFIGS["mixtral"], "model_type": "mixtral"},
        "vision_config": {**_OTHER_VISION, "model_type": "pixtral", "head_dim": 4, "image_size": 8},
        "tie_word_embeddings": False,
    },
}  # fmt: skip
HEADS = {"qwen3_5_moe": "mtp.fc.weight", "glm4v_moe": "model.language_model.layers.3.eh_proj.weight"}
"""A tensor of a multi-token-prediction head, where published folders have one."""


@pytest.fixture(scope="module", params=WRAPPERS)
def wrapper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A wrapper's type, and a folder of a tiny model as published, with a multi-token-prediction head and tensors of
    another dtype."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    write_as_published(name, their_model(name), folder / "hub")
    extra_tensors = {"visual.counts": torch.arange(5)}
    extra_tensors |= {HEADS[name]: torch.randn(24, 48).half()} if name in HEADS else {}
    file = folder / "hub" / "model.safetensors"
    save_file({**load_file(file), **extra_tensors}, file, {"format": "pt"})
    (folder / "hub" / "preprocessor_config.json").write_text('{"patch_size": 2}')
    return name, folder


def their_model(name: str, **changes: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**WRAPPERS[name], **changes})
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model.bfloat16()


def write_as_published(name: str, model: torch.nn.Module, folder: Path) -> None:
    if name == "qwen3_5_moe":
        model.save_pretrained(folder, save_original_format=False)
    else:
        write_theirs(model, folder)


def load_model(folder: Path) -> tuple[LanguageModelSpec, torch.nn.Module, tuple[str, ...]]:
    spec = tiny.spec_of(tiny.config_of(folder))
    model = tiny.blank(spec)
    return spec, model, load_weights(str(folder), model, spec).notes


def test_a_folder_comes_back_with_every_byte(wrapper: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = wrapper
    spec, model, notes = load_model(folder / "hub")
    origin = Origin.of_folder(str(folder / "hub"), spec)
    save_folder(spec, ModelSource(model), tmp_path / "out", origin=origin, max_shard_bytes=20_000)
    before, after = (tiny.tensors_of(path) for path in (folder / "hub", tmp_path / "out"))
    tiny.same_tensors(before, after)
    words = ("visual", "vision", "projector", "mtp", "eh_proj")
    other_names = {key for key in before if any(word in key for word in words)}
    assert set(origin.untrained_names) == other_names
    count = len(other_names) - (name in HEADS)
    assert any(note.startswith(f"{count} tensors of other parts ") for note in notes)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{len(other_names)} tensors of other parts" in card
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == '{"patch_size": 2}'
    old_config, new_config = (
        transformers.AutoConfig.from_pretrained(path).to_dict() for path in (folder / "hub", tmp_path / "out")
    )
    constant_keys = family_of(tiny.config_of(folder / "hub"), "c").constant_keys
    old_config["text_config"] |= {**constant_keys, "dtype": "bfloat16"}
    assert new_config == {**old_config, "_name_or_path": new_config["_name_or_path"]}


def test_the_other_layout_of_experts_is_read_too(wrapper: tuple[str, Path], tmp_path: Path) -> None:
    """Per expert, as in block-FP8 folders, or all in one tensor, as in memory."""
    name, folder = wrapper
    _, model, _ = load_model(folder / "hub")
    their_model(name).save_pretrained(tmp_path / "other", save_original_format=name == "qwen3_5_moe")
    hub_shapes, other_shapes = (
        {key: tensor.shape for key, tensor in tiny.tensors_of(path).items()}
        for path in (folder / "hub", tmp_path / "other")
    )
    has_other = any(hub_shapes.get(key) != shape for key, shape in other_shapes.items())
    assert has_other == (name not in ("gemma4", "llama4")), "which have one layout"
    other_model = load_model(tmp_path / "other")[1]
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(parameter, other_model.get_parameter(parameter_name)), parameter_name


@pytest.mark.sample(2)
def test_transformers_computes_the_same_with_an_export(wrapper: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = wrapper
    spec, model, _ = load_model(folder / "hub")
    save_folder(spec, ModelSource(model), tmp_path / "out", origin=Origin.of_folder(str(folder / "hub"), spec))
    tokens = torch.arange(40).view(2, 20) % 48
    logits = []
    for path in (folder / "hub", tmp_path / "out"):
        theirs, info = transformers.AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
        )
        assert not info["missing_keys"]
        with torch.no_grad():
            # Of Llama 4, transformers 5.24 cannot run the whole model without a picture.
            runnable = theirs.language_model if theirs.config.model_type == "llama4" else theirs
            logits.append(runnable.eval()(input_ids=tokens, use_cache=False).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("code", "changes", "key", "value"),
    [
        ("unknown_key", {"colour": "red"}, "colour", "red"),
        ("unknown_key", {"hidden_size": 24}, "hidden_size", 24),
        ("wrong_type", {"text_config": [1]}, "text_config", [1]),
        ("missing", {"text_config": None}, "text_config", None),
        ("wrong_type", {"tie_word_embeddings": "no"}, "tie_word_embeddings", "no"),
        ("unsupported", {"language_model_only": True}, "language_model_only", True),
        ("unsupported", {"text_config": {"model_type": "llama"}}, "text_config.model_type", "llama"),
        ("unsupported", {"text_config": {"model_type": []}}, "text_config.model_type", []),
        ("unsupported", {"text_config": {"model_type": {}}}, "text_config.model_type", {}),
        ("unsupported", {"text_config": {"hidden_act": "relu"}}, "text_config.hidden_act", "relu"),
        ("wrong_type", {"text_config": {"vocab_size": "48"}}, "text_config.vocab_size", "48"),
        ("unknown_key", {"text_config": {"colour": "red"}}, "text_config.colour", "red"),
        ("unsupported", {"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method", "awq"),
        ("unsupported", {"text_config": {"quantization_config": {"quant_method": "awq"}}},
         "text_config.quantization_config.quant_method", "awq"),
    ],
)  # fmt: skip
def test_a_problem_names_the_part_of_the_config(code: ProblemCode, changes: dict[str, Any], key: str, value: Any):
    with expect_problem(code, f"c:{key}", value):
        describe_config({"model_type": "qwen3_5_moe", "text_config": {}, **changes}, "c")


@pytest.mark.parametrize(
    ("outer", "inner", "is_tied"), [(True, False, True), (False, True, False), (None, True, False)]
)
def test_the_wrapper_says_whether_embeddings_are_tied(outer: bool | None, inner: bool, is_tied: bool) -> None:
    config = {"model_type": "qwen3_5_moe", "text_config": {"tie_word_embeddings": inner}}
    config |= {} if outer is None else {"tie_word_embeddings": outer}
    spec = tiny.spec_of(config)
    assert spec.tie_embeddings is is_tied
    unchanged = build_config(spec, config, "float32")
    assert (unchanged.get("tie_word_embeddings"), unchanged["text_config"]["tie_word_embeddings"]) == (outer, inner)
    changed_spec = spec.model_copy(update={"tie_embeddings": not is_tied})
    changed = build_config(changed_spec, config, "float32")
    assert changed["tie_word_embeddings"] is not is_tied
    assert tiny.spec_of(changed).tie_embeddings is not is_tied


def test_what_was_written_beside_from_changes_the_language_models_config_alone() -> None:
    config = {"model_type": "qwen3_5_moe", "eos_token_id": 3, **WRAPPERS["qwen3_5_moe"]}
    spec = tiny.spec_of(config)
    changed_spec = LanguageModelSpec(**{
        **spec.model_dump(), "norm_eps": 1e-3,
        "attention": {**spec.attention.model_dump(), "rope": {"base": 5e5, "fraction": 0.25}},
    })  # fmt: skip
    export = build_config(changed_spec, config, "float32")
    assert {key: export[key] for key in ("vision_config", "eos_token_id")} == {
        key: config[key] for key in ("vision_config", "eos_token_id")
    }
    text_config = export["text_config"]
    assert text_config["rms_norm_eps"] == 1e-3
    assert text_config["rope_parameters"].items() >= {"rope_theta": 5e5, "mrope_section": [11, 11, 10]}.items()
    assert tiny.spec_of(export) == changed_spec


@pytest.mark.parametrize("name", ["glm4v_moe", "qwen3_5_moe", "qwen3_vl_moe"])
def test_scaled_rope_beside_from_leaves_positions_of_pictures_unchanged(name: str) -> None:
    config = {"model_type": name, **WRAPPERS[name]}
    positions = picture_positions(config["text_config"]["rope_parameters"])
    assert positions
    spec = tiny.spec_of(config)
    rope_spec = {**spec.attention.rope.model_dump(), "scaling": {"kind": "yarn", "factor": 4.0, "original_tokens": 64}}
    attention = {**spec.attention.model_dump(), "rope": rope_spec}
    changed_spec = LanguageModelSpec(**{**spec.model_dump(), "attention": attention})
    export = build_config(changed_spec, config, "float32")
    assert tiny.spec_of(export) == changed_spec
    parameters = transformers.AutoConfig.for_model(**export).text_config.rope_parameters
    assert parameters.items() >= {"rope_type": "yarn", "factor": 4.0, **positions}.items()


def test_ids_of_tokens_are_the_language_models_or_else_the_wrappers() -> None:
    for config, expected in (({"eos_token_id": 5}, 5), ({"text_config": {"eos_token_id": 7}}, 7),
                             ({"eos_token_id": 5, "text_config": {"eos_token_id": None}}, 5),
                             ({"eos_token_id": 5, "text_config": {"eos_token_id": 7}}, 7)):  # fmt: skip
        origin = Origin("/models/base", {"model_type": "qwen3_5_moe", "text_config": {}, **config}, "BF16")
        assert origin.text_config["eos_token_id"] == expected


@pytest.mark.sample(1)
def test_a_tensor_among_the_language_models_is_not_another_parts(wrapper: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = wrapper
    shutil.copytree(folder / "hub", tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    tensors = load_file(file)
    embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    extra = embedding.replace("embed_tokens", "extra")
    save_file({**tensors, extra: torch.zeros(3)}, file)
    with expect_problem("unknown_key", f"{file}:{extra}", [3]):
        load_model(tmp_path / "hub")


@pytest.mark.parametrize("name", WRAPPERS)
def test_missing_keys_mean_what_transformers_takes_them_for(name: str) -> None:
    required_keys = {
        "glm4v_moe": {"head_dim": 128},  # its default heads have an odd number of pairs
        "gemma4": {"hidden_size_per_layer_input": 0},
    }.get(name, {})
    config = {"text_config": {"num_hidden_layers": 5, **required_keys}}
    full = transformers.AutoConfig.for_model(name, **json.loads(json.dumps(config))).to_dict()
    assert meaning(tiny.spec_of({"model_type": name, **config})) == meaning(tiny.spec_of(full))


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_card_says_which_release_it_was_compared_with(name: str) -> None:
    config = {"model_type": name, **WRAPPERS[name]}
    spec, family = tiny.spec_of(config), family_of(config, "c")
    assert (f"not transformers 4: it has no {name}" in readers(spec, family)) == (name not in WRAPPERS_OF_OLDER)
    assert (f"4 (compared with {CURRENT} and {OLDER})" in readers(spec, family)) == (name in WRAPPERS_OF_OLDER)
    assert "not on transformers 4" in adapter_readers(spec, family, parameters=False)


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "glm4v_moe"])
def test_positions_of_pictures_are_where_transformers_4_requires_them(name: str) -> None:
    config = {"model_type": name, **WRAPPERS[name]}
    exported = build_config(tiny.spec_of(config), config, "bfloat16")["text_config"]
    positions = picture_positions(config["text_config"]["rope_parameters"])
    assert exported["rope_scaling"] == {"rope_type": "default", **positions}
    assert picture_positions(exported["rope_parameters"]) == positions


def test_a_wrapper_is_not_upcycled(tmp_path: Path) -> None:
    """A mixture's config has no place for its other parts."""
    text_config = {**tiny._BASE, **tiny.CONFIGS["llama"], "model_type": "llama"}
    config = {"model_type": "mistral3", "text_config": text_config, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert expand_model({"from": str(tmp_path)}, None)["ffn_dim"] == 40
    with expect_problem("unsupported", "model.upcycle"):
        expand_model({"from": str(tmp_path), "upcycle": {"num_experts": 4}}, None)


def test_the_router_loss_is_refused_by_its_path(tmp_path: Path) -> None:
    text_config = {**WRAPPERS["qwen3_5_moe"]["text_config"], "output_router_logits": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text_config}))
    with expect_problem("unsupported", f"{path}:text_config.output_router_logits", True):
        expand_model({"from": str(tmp_path)}, None, is_trained=True)


def test_experts_that_may_be_stored_either_way_are_refused(tmp_path: Path) -> None:
    """Their outputs are as many as their inputs; transformers then takes them not to be transposed."""
    name = "qwen3_vl_moe"
    changes = {"text_config": {**WRAPPERS[name]["text_config"], "moe_intermediate_size": 12}}
    write_as_published(name, their_model(name, **changes), tmp_path)
    tensor = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    with expect_problem("conflict", f"{tmp_path}/model.safetensors:{tensor}"):
        load_model(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_moe", "kimi_k25"])
def test_a_job_trains_the_language_model_alone(name: str, tmp_path: Path) -> None:
    text_config = {**WRAPPERS[name]["text_config"], "vocab_size": 640}
    write_as_published(name, their_model(name, text_config=text_config).float(), tmp_path / "hub")
    spec = further(with_tiktoken(tmp_path / "hub", "[BOS]", "[EOS]"), tmp_path, 2)
    run(spec, tmp_path / "storage", tmp_path / "cache")
    save_checkpoint_as_folder(str(stored_in(tmp_path / "storage", 2)), tmp_path / "out")
    before, after = tiny.tensors_of(tmp_path / "hub"), tiny.tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    changed_names = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed_names
    assert not any(word in key for key in changed_names for word in ("visual", "vision", "projector"))
    _, info = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    run(with_adapter(spec, rank=2), tmp_path / "adapted", tmp_path / "cache")
    checkpoint = str(stored_in(tmp_path / "adapted", 2))
    save_checkpoint_as_folder(checkpoint, tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(key.startswith("base_model.model.model.language_model.layers.") for key in names)
    modules = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert all(module.startswith(("self_attn.", "linear_attn.")) for module in modules), "vision has modules q_proj too"
    save_checkpoint_as_folder(checkpoint, tmp_path / "merged", merge=True)
    merged = tiny.tensors_of(tmp_path / "merged")
    assert merged.keys() == before.keys()


def test_block_fp8_has_experts_one_by_one(tmp_path: Path) -> None:
    """As Qwen3.5 is published in FP8; an export has all experts in one tensor, as the other folders."""
    name, folder = "qwen3_5_moe", tmp_path / "hub"
    their_model(name).save_pretrained(folder, save_original_format=True)
    file, expected = folder / "model.safetensors", dict[str, torch.Tensor]()
    tensors = load_file(file)
    for key in [key for key in tensors if ".mlp.experts." in key]:
        values = tensors[key].to(torch.float8_e4m3fn)
        rows, columns = values.shape
        scales = torch.rand(-(-rows // 8), -(-columns // 8)) + 0.5
        tensors |= {key: values, f"{key}_scale_inv": scales}
        expected[key] = values.float() * scales.repeat_interleave(8, 0).repeat_interleave(8, 1)[:rows, :columns]
    save_file(tensors, file, {"format": "pt"})
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8], "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**tiny.config_of(folder), "quantization_config": scheme}))
    spec, model, _ = load_model(folder)
    stem = "model.language_model.layers.1.mlp.experts"
    up = model.get_parameter("layers.1.feed_forward.moe.experts.w_in")
    assert torch.equal(up[3], expected[f"{stem}.3.up_proj.weight"].T)
    save_folder(spec, ModelSource(model), tmp_path / "out", origin=Origin.of_folder(str(folder), spec))
    down = tiny.tensors_of(tmp_path / "out")[f"{stem}.down_proj"]
    assert torch.equal(down[2], expected[f"{stem}.2.down_proj.weight"].bfloat16())
    assert "quantization_config" not in tiny.config_of(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["qwen3.5-35b-a3b", "qwen3-vl-30b-a3b", "gemma-4-26b-a4b"])
def test_a_published_config_is_planned_as_its_preset(preset: str, tmp_path: Path) -> None:
    """From the config file alone."""
    (tmp_path / "model.json").write_text(json.dumps(HUB[preset]))
    plans = []
    for model in ({"from": str(tmp_path / "model.json")}, {"preset": preset}):
        fields = {
            "name": "t", "data": {"corpus": "documents", "sources": [{"paths": ["/data/*.jsonl"]}], "max_tokens": 4096},
            "model": model, "train": {"num_steps": 10, "batch_tokens": 2**20, "dtype": "bfloat16"},
            "resources": {"num_workers": 64},
        }  # fmt: skip
        cluster = Cluster(num_nodes=8, devices_per_node=8, device="h200")
        plans.append(plan_job(JobSpec.parse(expand(fields, None)), cluster))
    assert plans[0].degrees == plans[1].degrees
    assert plans[0].memory == plans[1].memory
