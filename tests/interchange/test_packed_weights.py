"""Folders with int4 and NVFP4 weights: decoded into full weights, or into the bases of adapters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.interchange.catalog import catalog
from moe.interchange.config import describe_config
from moe.interchange.digest import digest_of
from moe.interchange.expand import expand_model
from moe.interchange.hub_folder import HubFolder
from moe.interchange.load import load_weights
from moe.interchange.origin import Origin
from moe.interchange.quantization import QuantizationFile
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource
from moe.interchange.tensor_reader import TensorReader
from moe.spec import ProblemCode, model_spec
from moe.tasks.language import build_model
from tests.interchange import tiny
from tests.interchange.folders import load, reconfigure, refusal, rewrite
from tests.interchange.packed import (
    INT4,
    INT4_WEIGHTS,
    MODELOPT,
    NVFP4,
    NVFP4_WEIGHTS,
    OF_COMPRESSED_TENSORS,
    OF_MODELOPT,
    SIDECAR,
    Pack,
    awq,
    fp8,
    group_of,
    int4,
    mixed,
    mxfp8,
    pack_experts,
    sidecar,
)
from tests.interchange.test_wrappers import WRAPPERS, their_model, write_as_published
from tests.refusals import expect_problem

SIZES = {"hidden_size": 64, "moe_intermediate_size": 32}
FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
    "int4": (INT4, int4(32)),
    "int4, groups across words": (group_of(12), int4(12)),
    "nvfp4": (NVFP4, OF_COMPRESSED_TENSORS),
    "nvfp4 of modelopt": (MODELOPT, OF_MODELOPT),
    "nvfp4 of modelopt, in a section": ({"quant_method": "modelopt", **sidecar("NVFP4")}, OF_MODELOPT),
    "NVFP4": (sidecar("NVFP4", group_size=16), OF_MODELOPT),
    "W4A16_NVFP4": (sidecar("W4A16_NVFP4", group_size=16), OF_MODELOPT),
    "W4A16_AWQ": (sidecar("W4A16_AWQ", group_size=8, has_zero_point=False, pre_quant_scale=True), awq),
    "FP8": (sidecar("FP8"), fp8(None, lambda *_: ())),
    "FP8_PER_CHANNEL_PER_TOKEN": (sidecar("FP8_PER_CHANNEL_PER_TOKEN"), fp8((1, 1 << 20), lambda rows, _: (rows,))),
    "FP8_PB_WO": (sidecar("fp8_pb_wo"), fp8((128, 128), lambda rows, columns: (rows, 1, columns, 1))),
    "MXFP8": (sidecar("MXFP8", group_size=32), mxfp8),
    "MIXED_PRECISION": (
        sidecar("MIXED_PRECISION", quantized_layers={
            "model.layers.1.mlp.experts.0.down_proj": {"quant_algo": "FP8"},
            "model.layers.1.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        }),
        mixed,
    ),
}  # fmt: skip
ODD_SIZES = {
    "int4, groups across words": {"hidden_size": 60, "moe_intermediate_size": 36},
    "FP8_PB_WO": {"hidden_size": 300, "moe_intermediate_size": 132},
}


def packed_folder(hub: Callable[..., Path], name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    config, pack = FORMATS[name]
    folder = hub("deepseek_v3", num_hidden_layers=2, **ODD_SIZES.get(name, SIZES))
    return folder, pack_experts(folder, config, pack)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_experts_are_decoded_and_exported_as_full_weights(name: str, hub, tmp_path: Path):
    folder, values = packed_folder(hub, name)
    spec, model = tiny.spec_of(tiny.config_of(folder)), load(folder)
    save_folder(spec, ModelSource(model), tmp_path / "out", origin=Origin.of_folder(str(folder), spec))
    experts = model.get_parameter("layers.1.feed_forward.moe.experts.w_out")
    assert torch.equal(experts[2], values["model.layers.1.mlp.experts.2.down_proj.weight"].T)
    output = tiny.tensors_of(tmp_path / "out")
    for matrix, plain in values.items():
        assert torch.equal(output[matrix], plain.bfloat16()), matrix
    plain_names = {name for name in tiny.tensors_of(folder) if ".experts." not in name and not name.endswith("_scale")}
    assert output.keys() == plain_names | values.keys()
    assert "quantization_config" not in tiny.config_of(tmp_path / "out")


def test_packed_experts_within_a_multimodal_model_are_decoded(tmp_path: Path):
    """Kimi-K2.5: `quantization_config` is in the config of its language model."""
    text_config = {**WRAPPERS["kimi_k25"]["text_config"], **SIZES}
    write_as_published("kimi_k25", their_model("kimi_k25", text_config=text_config), tmp_path / "hub")
    values = pack_experts(tmp_path / "hub", INT4, int4(32))
    config = tiny.config_of(tmp_path / "hub")
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    spec, model = tiny.spec_of(config), load(tmp_path / "hub")
    save_folder(spec, ModelSource(model), tmp_path / "out", origin=Origin.of_folder(str(tmp_path / "hub"), spec))
    output = tiny.tensors_of(tmp_path / "out")
    assert all(torch.equal(output[matrix], plain.bfloat16()) for matrix, plain in values.items())
    assert "quantization_config" not in tiny.config_of(tmp_path / "out")["text_config"]


@pytest.mark.parametrize("name", ["int4, groups across words", "nvfp4", "W4A16_AWQ", "FP8_PB_WO"])
def test_rectangles_of_packed_matrices_are_parts_of_the_whole(name: str, hub):
    folder, values = packed_folder(hub, name)
    folder_catalog = catalog(HubFolder(str(folder), None))
    reader = TensorReader(folder_catalog.tensors, folder_catalog.files)
    matrix, plain = next(iter(values.items()))
    rows, columns = plain.shape
    torch.manual_seed(2)
    for _ in range(50):
        (low, high), (first, last) = (sorted(torch.randint(0, size + 1, (2,)).tolist()) for size in (rows, columns))
        region = ((low, high), (first, last))
        assert torch.equal(reader.read(matrix, region), plain[low:high, first:last]), region
    reader.close()


@pytest.mark.parametrize(("name", "base"), [("int4", "nf4"), ("nvfp4", "int8"), ("MIXED_PRECISION", "nf4")])
def test_packed_experts_are_bases_of_adapters(name: str, base: str, hub, tmp_path: Path):
    """The quantized base equals that of a folder with the decoded values."""
    folder, values = packed_folder(hub, name)
    spec = model_spec(expand_model({"from": str(folder), "adapter": {"rank": 2, "base": base}}, None))
    model = build_model(spec)
    load_weights(str(folder), model, spec)

    def decode(tensors: dict[str, torch.Tensor]) -> None:
        for matrix in [matrix for matrix in tensors if ".experts." in matrix]:
            del tensors[matrix]
        tensors.update(values)

    rewrite(folder, decode)
    wide = build_model(spec)
    load_weights(str(folder), wide, spec)
    state = wide.state_dict()
    assert any(".experts." in name and tensor.dtype in (torch.uint8, torch.int8) for name, tensor in state.items())
    for name, tensor in model.state_dict().items():
        if "_lora_" not in name:
            assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize(("config", "pack"), [(INT4, int4(32)), (NVFP4, OF_COMPRESSED_TENSORS)])
def test_packed_matrices_are_decoded_as_compressed_tensors_decodes_them(config: dict[str, Any], pack: Pack):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    torch.manual_seed(3)
    packed, values = pack("m", 40, 96)
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    theirs = compressor.decompress({name.removeprefix("m."): tensor for name, tensor in packed.items()}, scheme)
    assert torch.equal(theirs["weight"], values.bfloat16())


def weights_of(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    weights = INT4_WEIGHTS if config is INT4 else NVFP4_WEIGHTS
    return {**config, "config_groups": {"group_0": {"weights": {**weights, **changes}}}}


MODULE, GROUP = "model.layers.1.mlp.experts.2.down_proj", "config_groups.group_0."
REFUSALS: list[tuple[ProblemCode, dict[str, Any], str]] = [
    ("unsupported", {**INT4, "format": "marlin-24"}, "format"),
    ("unsupported", {**INT4, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ("unsupported", {**INT4, "sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config"),
    ("unsupported", {**INT4, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ("unsupported", weights_of(INT4, num_bits=8), f"{GROUP}weights.num_bits"),
    ("unsupported", weights_of(INT4, num_bits=None), f"{GROUP}weights.num_bits"),
    ("unsupported", weights_of(INT4, symmetric=False), f"{GROUP}weights.symmetric"),
    ("unsupported", weights_of(INT4, actorder="group"), f"{GROUP}weights.actorder"),
    ("unsupported", weights_of(INT4, type="float"), f"{GROUP}weights.type"),
    ("unsupported", weights_of(INT4, strategy="channel"), f"{GROUP}weights.strategy"),
    ("unsupported", weights_of(NVFP4, group_size=32), f"{GROUP}weights.group_size"),
    ("invalid_value", weights_of(INT4, group_size=-1), f"{GROUP}weights.group_size"),
    ("wrong_type", {**INT4, "config_groups": {}}, "config_groups"),
    ("wrong_type", {**INT4, "config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16"),
    ("unsupported", {**INT4, "config_groups": {"a": {"weights": INT4_WEIGHTS, "output_activations": {"num_bits": 8}}}},
     "config_groups.a.output_activations"),
    ("unsupported", {**INT4, "config_groups": {**INT4["config_groups"], **group_of(64, "b")["config_groups"]}},
     "config_groups.b.weights.group_size"),
    ("unsupported", {**MODELOPT, "quant_algo": "NVFP4_SVD"}, "quant_algo"),
    ("unsupported", {**MODELOPT, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ("unsupported", {**MODELOPT, "group_size": 32}, "group_size"),
    ("unknown_key", {**MODELOPT, "quantized_layers": {"a": {}}}, "quantized_layers"),
    ("unknown_key", weights_of(INT4, codebook=[0.0]), f"{GROUP}weights.codebook"),
    ("unsupported", {**MODELOPT, "has_zero_point": True}, "has_zero_point"),
]  # fmt: skip


LAYERS = {"a": {"quant_algo": "FP8"}}
REFUSALS_OF_FILES: list[tuple[ProblemCode, dict[str, Any], str]] = [
    ("wrong_type", {"quantization": None}, ""),
    ("unsupported", sidecar("W8A8_SQ_PER_CHANNEL"), ".quant_algo"),
    ("unsupported", sidecar("NVFP4", group_size=32), ".group_size"),
    ("unsupported", sidecar("FP8", kv_cache_quant_algo="FP4"), ".kv_cache_quant_algo"),
    ("unknown_key", sidecar("FP8", quantized_layers=LAYERS), ".quantized_layers"),
    ("unknown_key", sidecar("FP8", codebook=[0.0]), ".codebook"),
    ("wrong_type", sidecar("MIXED_PRECISION"), ".quantized_layers"),
    ("wrong_type", sidecar("MIXED_PRECISION", quantized_layers={**LAYERS, "b": {}}), ".quantized_layers.b"),
    ("unsupported", sidecar("MIXED_PRECISION", quantized_layers={**LAYERS, "b": {"quant_algo": "W4A8_AWQ"}}),
     ".quantized_layers.b.quant_algo"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "content", "key"), REFUSALS_OF_FILES)
def test_other_quantizations_are_refused_by_the_key_of_their_file(code: ProblemCode, content: dict[str, Any], key: str):
    with expect_problem(code, f"{SIDECAR}:quantization{key}"):
        describe_config(tiny.config_of_family("deepseek_v3"), "c", QuantizationFile(content, SIDECAR))


def test_the_config_has_precedence_over_the_quantization_file(hub):
    """Newer releases of the Model Optimizer write both."""
    folder, values = packed_folder(hub, "nvfp4 of modelopt")
    (folder / SIDECAR).write_text(json.dumps(sidecar("W8A16")))
    experts = load(folder).get_parameter("layers.1.feed_forward.moe.experts.w_out")
    assert torch.equal(experts[2], values["model.layers.1.mlp.experts.2.down_proj.weight"].T)


def test_a_model_is_expanded_only_if_its_quantization_file_is_supported(hub):
    folder, _ = packed_folder(hub, "FP8")
    (folder / SIDECAR).write_text(json.dumps(sidecar("W8A16")))
    with expect_problem("unsupported", f"{folder}/{SIDECAR}:quantization.quant_algo"):
        expand_model({"from": str(folder)}, None)


@pytest.mark.parametrize(("code", "config", "key"), REFUSALS)
def test_other_quantizations_are_refused_by_key(code: ProblemCode, config: dict[str, Any], key: str):
    with expect_problem(code, f"c:quantization_config.{key}"):
        describe_config({**tiny.config_of_family("deepseek_v3"), "quantization_config": config}, "c")


def test_only_the_quantization_of_weights_is_applied():
    config = tiny.config_of_family("deepseek_v3")
    for quantization, num_notes in ((INT4, 0), (NVFP4, 1), (MODELOPT, 1)):
        assert len(describe_config({**config, "quantization_config": quantization}, "c").notes) == num_notes
    for content, num_notes in ((sidecar("NVFP4"), 2), (sidecar("W4A16_NVFP4"), 1), (sidecar(None), 1)):
        assert len(describe_config(config, "c", QuantizationFile(content, SIDECAR)).notes) == num_notes


def test_packed_tensors_that_do_not_fit_are_named(hub):
    folder, _ = packed_folder(hub, "nvfp4")
    prefix = "model.layers.1.mlp.experts."
    missing = ("0.up_proj.weight_scale", "1.up_proj.weight_global_scale")
    misshapen = ("2.up_proj.weight_packed",)
    unknown = ("3.up_proj.weight_g_idx", "3.up_proj.weight_zero_point")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in missing:
            del tensors[prefix + name]
        tensors |= {prefix + name: torch.zeros(3, 5, dtype=torch.uint8) for name in (*misshapen, *unknown)}

    rewrite(folder, change)
    expected = {("missing", f"{prefix}{expert}.up_proj.weight_packed") for expert in (0, 1)}
    expected |= {("shape_mismatch", prefix + name) for name in misshapen}
    expected |= {("unknown_key", prefix + name) for name in unknown}
    places = {(problem.code, problem.path.rpartition(":")[2]) for problem in refusal(folder).problems}
    assert places >= expected


@pytest.mark.parametrize(
    ("name", "part", "tensor", "code"),
    [
        ("FP8", "weight_scale", None, "missing"),
        ("FP8", "weight_scale", torch.zeros(3), "shape_mismatch"),
        ("MXFP8", "weight_scale", torch.zeros(64, 2, dtype=torch.uint8), "shape_mismatch"),
        ("W4A16_AWQ", "weight_scale", None, "missing"),
        ("W4A16_AWQ", "weight_scale", torch.zeros(63, 4), "shape_mismatch"),
        ("W4A16_AWQ", "pre_quant_scale", torch.zeros(31), "shape_mismatch"),
        ("NVFP4", "weight_scale_2", torch.zeros(2), "shape_mismatch"),
    ],
)
def test_tensors_of_modelopt_that_do_not_fit_are_named(
    name: str, part: str, tensor: torch.Tensor | None, code: ProblemCode, hub
):
    folder, _ = packed_folder(hub, name)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{MODULE}.{part}"]
        tensors |= {} if tensor is None else {f"{MODULE}.{part}": tensor}

    rewrite(folder, change)
    places = {(problem.code, problem.path.rpartition(":")[2]) for problem in refusal(folder).problems}
    assert (code, f"{MODULE}.weight") in places


@pytest.mark.parametrize(("scales", "code"), [(None, "missing"), (torch.zeros(4, 3), "shape_mismatch")])
def test_mxfp4_blocks_without_fitting_scales_are_named(scales: torch.Tensor | None, code: ProblemCode, hub):
    folder, name = hub("gpt_oss", num_hidden_layers=1), "model.layers.0.mlp.experts.down_proj"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]
        tensors[f"{name}_blocks"] = torch.zeros(4, 24, 1, 16, dtype=torch.uint8)
        tensors |= {} if scales is None else {f"{name}_scales": scales}

    rewrite(folder, change)
    reconfigure(folder, quantization_config={"quant_method": "mxfp4"})
    problems = refusal(folder).problems
    assert (code, f"{folder}/model.safetensors:{name}_blocks") in {(problem.code, problem.path) for problem in problems}


def test_the_digest_covers_all_scales(hub):
    folder, _ = packed_folder(hub, "nvfp4")
    digests = {digest_of(str(folder), None)}
    for part in ("weight_scale", "weight_global_scale"):
        rewrite(folder, lambda tensors, part=part: tensors[f"{MODULE}.{part}"].view(torch.uint8).add_(1))
        digests.add(digest_of(str(folder), None))
    assert len(digests) == 3
