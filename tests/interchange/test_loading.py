"""Folders into models: on several ranks, with quantized tensors decoded and untrained ones kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from moe.interchange.expand import expand_model
from moe.interchange.load import load_weights
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource
from moe.parallel import Layout, extent, local_parameters
from moe.spec import SpecError, model_spec
from tests.interchange import tiny
from tests.interchange.folders import load, reconfigure, refusal, rewrite
from tests.parity.gloo_ranks import Pools
from tests.refusals import expect_problem

SPREAD = ("mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "granitemoeshared", "sarvam_moe", "lfm2_moe", "nemotron_h")
MESHES: dict[int, dict[str, int]] = {
    2: {"fsdp": 2, "expert": 2},
    4: {"tensor": 2, "fsdp": 2, "expert": 2, "expert_fsdp": 2},
}


# On several ranks.


def on_a_rank(folder: str, out: str, degrees: dict[str, int], upcycle: dict[str, Any] | None = None) -> tuple[int, int]:
    """Load a folder into this rank's part, compare it with the whole, and write it with the others; return the number
    of elements of the part and of the whole. `upcycle` makes a mixture of a dense folder's model."""
    fields = {"from": folder} if upcycle is None else {"from": folder, "upcycle": upcycle}
    spec, layout = model_spec(expand_model(fields, None)), Layout.from_degrees(degrees)
    model, full_model = tiny.sharded_model(spec, layout), tiny.blank(spec)
    load_weights(folder, model, spec, layout, seed=5)
    load_weights(folder, full_model, spec, seed=5)
    num_elements = 0
    for parameter in local_parameters(model):
        place = tuple(slice(*bounds) for bounds in extent(parameter.part, layout))
        assert torch.equal(parameter.local, full_model.get_parameter(parameter.name)[place]), parameter.name
        num_elements += parameter.local.numel()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, full_model.get_buffer(name)), name
    origin = Origin.of_folder(folder, spec)
    save_folder(spec, ModelSource(model, layout), out, origin=origin, max_shard_bytes=20_000)
    layout.close()
    return num_elements, spec.num_parameters()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("family", SPREAD)
@pytest.mark.parametrize("world_size", sorted(MESHES))
def test_each_rank_has_its_part_and_together_they_write_the_same_folder(family, world_size, hub, tmp_path, ranks):
    folder = hub(family)
    sizes = ranks[world_size].run(on_a_rank, str(folder), str(tmp_path / "out"), MESHES[world_size])
    assert all(part < total for part, total in sizes)
    tiny.same_tensors(tiny.tensors_of(folder), tiny.tensors_of(tmp_path / "out"))


def fault_of_rank(folder: str, out: str | None) -> str:
    """Load this rank's part and write the folder `out`; return the message of the failure."""
    spec, layout = tiny.spec_of(tiny.config_of(folder)), Layout.from_degrees(MESHES[2])
    model = tiny.sharded_model(spec, layout)
    try:
        load_weights(folder, model, spec, layout)
        save_folder(spec, ModelSource(model, layout), out)
    except SpecError as error:
        return str(error)
    finally:
        layout.close()
    return ""


def test_a_fault_of_one_rank_is_raised_on_every_rank(hub: Callable[..., Path], tmp_path: Path, ranks: Pools):
    folder = hub("mixtral")
    (tmp_path / "full").write_text("no folder")  # rank 0 cannot write
    faults = ranks[2].run(fault_of_rank, str(folder), str(tmp_path / "full" / "out"))
    assert all("cannot be written" in fault for fault in faults)
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"  # the second rank's
    rewrite(folder, lambda tensors: tensors[name][2].fill_(torch.inf))
    faults = ranks[2].run(fault_of_rank, str(folder), None)
    assert all(name in fault and "contains infinite or NaN values" in fault for fault in faults)


# Quantised, tied, with heads that are not trained.


def round_trip(folder: Path, out: Path) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Load a folder and write it; return the model and the written tensors."""
    spec, model = tiny.spec_of(tiny.config_of(folder)), load(folder)
    save_folder(spec, ModelSource(model), out, origin=Origin.of_folder(str(folder), spec))
    return model, tiny.tensors_of(out)


def test_mxfp4_is_decoded_as_transformers_decodes_it(hub: Callable[..., Path], tmp_path: Path):
    folder = hub("gpt_oss", hidden_size=64, intermediate_size=32)
    expected: dict[str, torch.Tensor] = {}

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        torch.manual_seed(1)
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
            expected[name] = _convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)

    rewrite(folder, quantize)
    reconfigure(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    model, output = round_trip(folder, tmp_path / "out")
    first = expected["model.layers.0.mlp.experts.gate_up_proj"].float()
    assert torch.equal(model.get_parameter("layers.0.feed_forward.moe.experts.w_gate"), first[:, :, ::2])
    for name, tensor in expected.items():
        assert torch.equal(output[name], tensor), name
    assert "quantization_config" not in tiny.config_of(tmp_path / "out")


def test_fp8_is_multiplied_by_the_scale_of_each_block(hub: Callable[..., Path], tmp_path: Path):
    folder = hub("deepseek_v3")
    expected: dict[str, torch.Tensor] = {}

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        torch.manual_seed(1)
        tensors |= {  # multi-token-prediction heads are quantized, too
            "model.layers.3.enorm.weight": torch.randn(24).bfloat16(),
            "model.layers.3.mlp.gate.weight": torch.randn(4, 24).bfloat16(),
            "model.layers.3.self_attn.o_proj.weight": torch.randn(24, 20).bfloat16(),
        }
        for name in [name for name in tensors if "_proj" in name]:
            values = tensors[name].to(torch.float8_e4m3fn)
            rows, columns = values.shape
            scales = torch.rand(-(-rows // 16), -(-columns // 8)) + 0.5
            tensors[name], tensors[f"{name}_scale_inv"] = values, scales
            each_scale = scales.repeat_interleave(16, 0).repeat_interleave(8, 1)[:rows, :columns]
            expected[name] = values.float() * each_scale

    rewrite(folder, quantize)
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 8], "activation_scheme": "dynamic"}
    reconfigure(folder, quantization_config=scheme)
    model, output = round_trip(folder, tmp_path / "out")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    assert torch.equal(model.get_parameter("layers.1.feed_forward.moe.experts.w_out")[2], expected[name].T)
    assert output.keys() == {name for name in tiny.tensors_of(folder) if not name.endswith("_scale_inv")}
    for name, plain in expected.items():
        assert torch.equal(output[name], plain.bfloat16()), name


@pytest.mark.parametrize(
    ("family", "name"), [("glm4_moe", "model.layers.3.eh_proj.weight"), ("qwen3_next", "mtp.fc.weight")]
)
def test_heads_of_further_tokens_are_copied_and_reported(family, name, hub, tmp_path):
    folder = hub(family)
    rewrite(folder, lambda tensors: tensors.update({name: torch.randn(5, 3)}))
    spec = tiny.spec_of(tiny.config_of(folder))
    model = tiny.blank(spec)
    (note,) = load_weights(str(folder), model, spec).notes
    assert "not trained" in note
    assert name in note
    origin = Origin.of_folder(str(folder), spec)
    save_folder(spec, ModelSource(model), tmp_path / "out", origin=origin)
    tiny.same_tensors(tiny.tensors_of(folder), tiny.tensors_of(tmp_path / "out"))
    assert "- Not trained, unchanged: 1 tensors" in (tmp_path / "out" / "README.md").read_text()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(SpecError, match="must still be readable: 1 untrained tensors are copied from it"):
        save_folder(spec, ModelSource(model), tmp_path / "again", origin=origin)


def test_tied_logits_may_be_stored_if_they_are_equal(hub: Callable[..., Path], tmp_path: Path):
    folder = hub("qwen3")
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    _, output = round_trip(folder, tmp_path / "out")
    tiny.same_tensors(tiny.tensors_of(folder), output)
    rewrite(folder, lambda tensors: tensors["lm_head.weight"][3, 4].add_(1))
    problem = refusal(folder).problems[0]
    assert problem.path.endswith("model.safetensors:lm_head.weight")
    assert "tie_embeddings: false" in problem.remedy
    assert load(folder, tie_embeddings=False).get_parameter("output.weight").isfinite().all()


def test_names_may_lack_the_prefix_of_the_base_model(hub: Callable[..., Path]):
    folder = hub("qwen3")
    expected = load(folder)

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(folder, shorten)
    assert_equal_parameters(load(folder), expected)


def assert_equal_parameters(first: torch.nn.Module, second: torch.nn.Module) -> None:
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)), name


# Faults of a folder.


def test_nothing_is_left_of_an_export_that_fails_and_nothing_is_replaced(hub: Callable[..., Path], tmp_path: Path):
    folder = hub("llama")
    spec, model = tiny.spec_of(tiny.config_of(folder)), load(folder)

    class FailingSource(ModelSource):
        def read(self, name: str, within: Any, dtype: Any = None) -> torch.Tensor:
            if name == "norm.weight":
                raise OSError("no space left on device")
            return super().read(name, within, dtype)

    with expect_problem("not_writable", "target"):
        save_folder(spec, FailingSource(model), tmp_path / "out" / "here")
    assert list((tmp_path / "out").iterdir()) == []
    with expect_problem("already_exists", "target"):
        save_folder(spec, ModelSource(model), folder)


def test_a_folder_in_another_store_is_read_and_written(hub: Callable[..., Path]):
    folder = hub("granitemoe")
    fsspec.filesystem("memory").put(str(folder), "/hub/granite", recursive=True)
    spec = tiny.spec_of(tiny.config_of(folder))
    model, second_model = tiny.blank(spec), tiny.blank(spec)
    load_weights("memory://hub/granite", model, spec)
    origin = Origin.of_folder("memory://hub/granite", spec)
    save_folder(spec, ModelSource(model), "memory://hub/out", origin=origin, max_shard_bytes=20_000)
    load_weights("memory://hub/out", second_model, spec)
    assert_equal_parameters(second_model, model)
