"""Folders into models: on several ranks, decoded, carried through."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from moe.interchange.load import load_weights
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource
from moe.parallel import Layout, extent, local_parameters
from moe.spec import SpecError
from tests.interchange import tiny
from tests.interchange.folders import load, reconfigure, refusal, rewrite
from tests.parity.gloo_ranks import Ranks
from tests.refusals import refused

SPREAD = ("mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "granitemoeshared")
MESHES: dict[int, dict[str, int]] = {
    2: {"fsdp": 2, "expert": 2},
    4: {"tensor": 2, "fsdp": 2, "expert": 2, "expert_fsdp": 2},
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    made: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        if world_size not in made or made[world_size].ended:
            made[world_size] = Ranks(world_size)
        return made[world_size]

    yield of
    for each in made.values():
        each.close()


# On several ranks.


def on_a_rank(folder: str, out: str, degrees: dict[str, int]) -> tuple[int, int]:
    """Loads a folder into this rank's part, holds it against the whole, and writes it with the others."""
    spec, layout = tiny.spec_of(tiny.config_of(folder)), Layout.over(degrees)
    model, whole = tiny.placed(spec, layout), tiny.blank(spec)
    load_weights(folder, model, spec, layout)
    load_weights(folder, whole, spec)
    num_elements = 0
    for each in local_parameters(model):
        place = tuple(slice(*within) for within in extent(each.part, layout))
        assert torch.equal(each.local, whole.get_parameter(each.name)[place]), each.name
        num_elements += each.local.numel()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, whole.get_buffer(name)), name
    origin = Origin.of_folder(folder, spec)
    save_folder(spec, ModelSource(model, layout), out, origin=origin, max_shard_bytes=20_000)
    layout.close()
    return num_elements, spec.num_parameters()


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", SPREAD)
@pytest.mark.parametrize("world_size", sorted(MESHES))
def test_each_rank_has_its_part_and_together_they_write_the_same_folder(
    family: str, world_size: int, hub: Callable[..., Path], tmp_path: Path, ranks: Callable[[int], Ranks]
):
    folder = hub(family)
    told = ranks(world_size).run(on_a_rank, str(folder), str(tmp_path / "out"), MESHES[world_size])
    assert all(part < whole for part, whole in told)
    tiny.same_tensors(tiny.tensors_of(folder), tiny.tensors_of(tmp_path / "out"))


def cannot_write(folder: str, out: str) -> str:
    spec, layout = tiny.spec_of(tiny.config_of(folder)), Layout.over(MESHES[2])
    model = tiny.placed(spec, layout)
    load_weights(folder, model, spec, layout)
    try:
        save_folder(spec, ModelSource(model, layout), out)
    except SpecError as error:
        return str(error)
    finally:
        layout.close()
    return ""


def test_what_rank_0_cannot_write_every_rank_hears_of(
    hub: Callable[..., Path], tmp_path: Path, ranks: Callable[[int], Ranks]
):
    folder = hub("mixtral")
    (tmp_path / "full").write_text("no folder")
    told = ranks(2).run(cannot_write, str(folder), str(tmp_path / "full" / "out"))
    assert all("cannot be written" in each for each in told)


def with_a_damaged_tensor(folder: str) -> str:
    spec, layout = tiny.spec_of(tiny.config_of(folder)), Layout.over(MESHES[2])
    try:
        load_weights(folder, tiny.placed(spec, layout), spec, layout)
    except SpecError as error:
        return str(error)
    finally:
        layout.close()
    return ""


def test_what_one_rank_finds_every_rank_hears_of(hub: Callable[..., Path], ranks: Callable[[int], Ranks]):
    folder = hub("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"  # the second rank's
    rewrite(folder, lambda tensors: tensors[name][2].fill_(torch.inf))
    told = ranks(2).run(with_a_damaged_tensor, str(folder))
    assert all(name in each and "contains infinite or NaN values" in each for each in told)


# Quantised, tied, with heads that are not trained.


def test_mxfp4_is_decoded_as_transformers_decodes_it(hub: Callable[..., Path], tmp_path: Path):
    folder = hub("gpt_oss", hidden_size=64, intermediate_size=32)
    expected: dict[str, torch.Tensor] = {}

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        torch.manual_seed(1)
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
            expected[name] = _convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)

    rewrite(folder, quantise)
    reconfigure(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    spec = tiny.spec_of(tiny.config_of(folder))
    model = load(folder)
    first = expected["model.layers.0.mlp.experts.gate_up_proj"].float()
    assert torch.equal(model.get_parameter("layers.0.feed_forward.moe.experts.w_gate"), first[:, :, ::2])
    save_folder(spec, ModelSource(model), tmp_path / "out", origin=Origin.of_folder(str(folder), spec))
    found = tiny.tensors_of(tmp_path / "out")
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert "quantization_config" not in tiny.config_of(tmp_path / "out")


def test_fp8_is_multiplied_by_the_scale_of_each_block(hub: Callable[..., Path], tmp_path: Path):
    folder = hub("deepseek_v3")
    expected: dict[str, torch.Tensor] = {}

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        torch.manual_seed(1)
        tensors |= {  # heads of further tokens are quantised, too
            "model.layers.3.enorm.weight": torch.randn(24).bfloat16(),
            "model.layers.3.mlp.gate.weight": torch.randn(4, 24).bfloat16(),
            "model.layers.3.self_attn.o_proj.weight": torch.randn(24, 20).bfloat16(),
        }
        for name in [name for name in tensors if "_proj" in name]:
            values = tensors[name].to(torch.float8_e4m3fn)
            rows, columns = values.shape
            scales = torch.rand(-(-rows // 16), -(-columns // 8)) + 0.5
            tensors[name], tensors[f"{name}_scale_inv"] = values, scales
            plain = torch.empty(rows, columns)
            for row in range(rows):
                for column in range(columns):
                    plain[row, column] = values[row, column].float() * scales[row // 16, column // 8]
            expected[name] = plain

    rewrite(folder, quantise)
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 8], "activation_scheme": "dynamic"}
    reconfigure(folder, quantization_config=quantised)
    spec = tiny.spec_of(tiny.config_of(folder))
    model = load(folder)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    assert torch.equal(model.get_parameter("layers.1.feed_forward.moe.experts.w_out")[2], expected[name].T)
    save_folder(spec, ModelSource(model), tmp_path / "out", origin=Origin.of_folder(str(folder), spec))
    found = tiny.tensors_of(tmp_path / "out")
    assert found.keys() == {each for each in tiny.tensors_of(folder) if not each.endswith("_scale_inv")}
    for each, plain in expected.items():
        assert torch.equal(found[each], plain.bfloat16()), each


def test_heads_of_further_tokens_come_through_unchanged_and_are_told(hub: Callable[..., Path], tmp_path: Path):
    for family, name in (("glm4_moe", "model.layers.3.eh_proj.weight"), ("qwen3_next", "mtp.fc.weight")):
        folder = hub(family)
        rewrite(folder, lambda tensors, name=name: tensors.update({name: torch.randn(5, 3)}))
        spec = tiny.spec_of(tiny.config_of(folder))
        model = tiny.blank(spec)
        told = load_weights(str(folder), model, spec)
        assert len(told.notes) == 1
        assert "not trained" in told.notes[0]
        assert name in told.notes[0]
        origin = Origin.of_folder(str(folder), spec)
        save_folder(spec, ModelSource(model), tmp_path / f"{family}-out", origin=origin)
        tiny.same_tensors(tiny.tensors_of(folder), tiny.tensors_of(tmp_path / f"{family}-out"))
        assert "- Not trained, unchanged: 1 tensors" in (tmp_path / f"{family}-out" / "README.md").read_text()
        for path in folder.glob("*.safetensors"):
            path.unlink()
        with pytest.raises(SpecError, match="must still be readable: 1 untrained tensors are copied from it"):
            save_folder(spec, ModelSource(model), tmp_path / "again", origin=origin)


def test_tied_logits_may_lie_there_too_if_they_are_the_same(hub: Callable[..., Path], tmp_path: Path):
    folder = hub("qwen3")
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    spec = tiny.spec_of(tiny.config_of(folder))
    save_folder(spec, ModelSource(load(folder)), tmp_path / "out", origin=Origin.of_folder(str(folder), spec))
    tiny.same_tensors(tiny.tensors_of(folder), tiny.tensors_of(tmp_path / "out"))
    rewrite(folder, lambda tensors: tensors["lm_head.weight"][3, 4].add_(1))
    problem = refusal(folder).problems[0]
    assert problem.path.endswith("model.safetensors:lm_head.weight")
    assert "tie_embeddings: false" in problem.remedy
    assert load(folder, tie_embeddings=False).get_parameter("output.weight").isfinite().all()


def test_names_of_a_base_model_lack_their_beginning(hub: Callable[..., Path]):
    folder = hub("qwen3")
    expected = load(folder)
    names: list[str] = []

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
            names.append(name)

    rewrite(folder, shorten)
    found = load(folder)
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, found.get_parameter(name))


# What is wrong with a folder.


def test_nothing_is_left_of_an_export_that_fails_and_nothing_is_replaced(hub: Callable[..., Path], tmp_path: Path):
    folder = hub("llama")
    spec, model = tiny.spec_of(tiny.config_of(folder)), load(folder)

    class Failing(ModelSource):
        def read(self, name: str, within: Any, dtype: Any = None) -> torch.Tensor:
            if name == "norm.weight":
                raise OSError("no space left on device")
            return super().read(name, within, dtype)

    with refused("not_writable", "target"):
        save_folder(spec, Failing(model), tmp_path / "out" / "here")
    assert list((tmp_path / "out").iterdir()) == []
    with refused("already_exists", "target"):
        save_folder(spec, ModelSource(model), folder)


def test_a_folder_in_another_store_is_read_and_written(hub: Callable[..., Path]):
    import fsspec

    folder = hub("granitemoe")
    store = fsspec.filesystem("memory")
    store.put(str(folder), "/hub/granite", recursive=True)
    spec = tiny.spec_of(tiny.config_of(folder))
    model = tiny.blank(spec)
    load_weights("memory://hub/granite", model, spec)
    origin = Origin.of_folder("memory://hub/granite", spec)
    save_folder(spec, ModelSource(model), "memory://hub/out", origin=origin, max_shard_bytes=20_000)
    again = tiny.blank(spec)
    load_weights("memory://hub/out", again, spec)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
