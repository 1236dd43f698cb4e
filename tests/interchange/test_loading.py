"""Folders into models: on several ranks, decoded, and what is wrong with a folder."""

import json
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from moe.interchange.load import load_weights
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource
from moe.parallel import Layout, extent, local_parameters
from moe.spec import SpecError
from tests.interchange import tiny
from tests.parity.gloo_ranks import Ranks

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


@pytest.fixture
def hub(tmp_path: Path) -> Callable[..., Path]:
    """A folder in the hub's layout, of any family."""

    def make(family: str, **over: Any) -> Path:
        return tiny.folder_of(tiny.theirs(family, **over), tmp_path / family)

    return make


def load(folder: Path, **over: Any) -> torch.nn.Module:
    spec = tiny.spec_of(tiny.config_of(folder), **over)
    model = tiny.blank(spec)
    load_weights(str(folder), model, spec)
    return model


def refusal(folder: Path, **over: Any) -> SpecError:
    with pytest.raises(SpecError) as raised:
        load(folder, **over)
    return raised.value


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """The folder's tensors, changed, in one file."""
    tensors = tiny.tensors_of(folder)
    change(tensors)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def reconfigure(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**tiny.config_of(folder), **changes}))


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
    assert all(name in each and "infinite or no numbers" in each for each in told)


# Quantised, tied, with heads that are not trained.


def test_mxfp4_is_decoded_as_transformers_decodes_it(hub: Callable[..., Path], tmp_path: Path):
    folder = hub("gpt_oss", hidden_size=64, intermediate_size=32)
    expected: dict[str, torch.Tensor] = {}

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        torch.manual_seed(1)
        for name in [
            name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        ]:
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
    quantised = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [16, 8],
        "activation_scheme": "dynamic",
    }
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


def test_heads_of_further_tokens_come_through_unchanged_and_are_told(
    hub: Callable[..., Path], tmp_path: Path
):
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
        assert (
            "Not trained, and unchanged: 1 tensors" in (tmp_path / f"{family}-out" / "README.md").read_text()
        )
        for path in folder.glob("*.safetensors"):
            path.unlink()
        with pytest.raises(SpecError, match="must still be readable: 1 tensors that were not trained"):
            save_folder(spec, ModelSource(model), tmp_path / "again", origin=origin)


def test_tied_logits_may_lie_there_too_if_they_are_the_same(hub: Callable[..., Path], tmp_path: Path):
    folder = hub("qwen3")
    rewrite(
        folder,
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
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


def test_every_tensor_that_does_not_fit_is_told_at_once_with_both_shapes(hub: Callable[..., Path]):
    folder = hub("mixtral")
    before = "model.layers.0.block_sparse_moe.experts"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{before}.1.w1.weight"] = torch.zeros(20, 25)
        del tensors[f"{before}.2.w2.weight"]
        tensors["model.layers.9.extra"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.zeros(24, dtype=torch.int32)

    rewrite(folder, change)
    told = {problem.path.rpartition(":")[2]: problem for problem in refusal(folder).problems}
    assert told.keys() == {f"{before}.1.w1.weight", f"{before}.2.w2.weight", "model.layers.9.extra",
                           "model.norm.weight"}  # fmt: skip
    wrong = told[f"{before}.1.w1.weight"]
    assert wrong.value == [20, 25]
    assert "[20, 24]" in wrong.rule
    assert "w_gate [4, 24, 20]" in wrong.rule
    assert "is missing" in told[f"{before}.2.w2.weight"].rule
    assert "no tensor that this model has" in told["model.layers.9.extra"].rule
    assert told["model.norm.weight"].value == "I32"


def test_logits_that_are_missing_are_told(hub: Callable[..., Path]):
    folder = hub("mixtral")
    rewrite(folder, lambda tensors: tensors.__delitem__("lm_head.weight"))
    assert "tie_word_embeddings" in str(refusal(folder))


def test_pickles_are_refused_and_never_loaded(hub: Callable[..., Path]):
    folder = hub("llama")
    for path in folder.glob("*.safetensors*"):
        path.unlink()

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb()))
    problem = refusal(folder).problems[0]
    assert "pytorch_model.bin" in problem.rule
    assert "never loaded" in problem.rule
    assert problem.path == "model.from"
    assert not _Bomb.gone_off


class _Bomb:
    gone_off = False

    def __reduce__(self) -> Any:
        return _go_off, ()


def _go_off() -> None:
    _Bomb.gone_off = True


@pytest.mark.parametrize("keep", [0, 5, 100, -1000, -1])
def test_a_file_that_is_cut_off_is_told_with_the_tensor_it_ends_in(keep: int, hub: Callable[..., Path]):
    folder = hub("llama")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    problem = refusal(folder).problems[0]
    assert problem.value.endswith("model.safetensors")
    assert "cut off" in problem.rule
    if keep < 0:
        (length,) = struct.unpack("<Q", content[:8])
        end = len(content) + keep - 8 - length
        within = [
            name
            for name, told in _header(content).items()
            if told["data_offsets"][0] <= end < told["data_offsets"][1]
        ]
        assert f"ends within {within[0]!r}" in problem.rule


def _header(content: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", content[:8])
    found = json.loads(content[8 : 8 + length])
    found.pop("__metadata__", None)
    return found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda header: header.update(model=[]), "does not say where 'model' lies"),
        (lambda header: header["model.norm.weight"].update(dtype="Q7"), "has the dtype 'Q7'"),
        (lambda header: header["model.norm.weight"].update(shape=[-1, -48]), "cannot be the bytes"),
        (lambda header: header["model.norm.weight"].update(shape=[23]), "cannot be the bytes"),
        (
            lambda header: header["model.norm.weight"]["data_offsets"].__setitem__(0, True),
            "cannot be the bytes",
        ),
        (lambda header: header.pop("model.norm.weight"), "does not begin where|beyond its last"),
    ],
)
def test_a_header_that_cannot_be_is_refused(
    change: Callable[[dict[str, Any]], Any], told: str, hub: Callable[..., Path]
):
    folder = hub("llama")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    with pytest.raises(SpecError, match=told):
        load(folder)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_no_numbers_are_told_with_file_and_tensor(value: float, hub: Callable[..., Path]):
    folder = hub("granitemoe")
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    rewrite(folder, lambda tensors: tensors[name][1, 2].fill_(value))
    problems = refusal(folder).problems
    assert [problem.path for problem in problems] == [f"{folder}/model.safetensors:{name}"]


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_bit_that_has_flipped_in_what_we_wrote_is_told(at: str, hub: Callable[..., Path], tmp_path: Path):
    folder = hub("mixtral")
    spec = tiny.spec_of(tiny.config_of(folder))
    out = tmp_path / "out"
    save_folder(spec, ModelSource(load(folder)), out, max_shard_bytes=20_000)
    load(out)
    path = sorted(out.glob("model-*"))[2]
    content = bytearray(path.read_bytes())
    entries = sorted(_header(bytes(content)).items(), key=lambda each: each[1]["data_offsets"][0])
    name = entries[0 if at == "first" else -1][0]
    (length,) = struct.unpack("<Q", content[:8])
    place = 8 + length if at == "first" else len(content) - 2
    content[place] ^= 1
    path.write_bytes(content)
    (problem,) = refusal(out).problems
    assert problem.path == f"{path}:{name}"
    assert "checksum" in problem.rule


def test_an_index_that_names_other_folders_is_refused(hub: Callable[..., Path]):
    folder = hub("llama")
    index = {"weight_map": {"model.norm.weight": "../llama/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "no .safetensors file of this folder" in str(refusal(folder))


def test_float8_without_scales_and_other_quantisations_are_refused(hub: Callable[..., Path]):
    folder = hub("llama")
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    assert name in str(refusal(folder))
    assert "F8_E4M3" in str(refusal(folder))
    for method in ("gptq", "awq", "bitsandbytes", "mxfp4"):
        reconfigure(folder, quantization_config={"quant_method": method})
        assert f"quant_method (='{method}')" in str(refusal(folder))


def test_nothing_is_left_of_an_export_that_fails_and_nothing_is_replaced(
    hub: Callable[..., Path], tmp_path: Path
):
    folder = hub("llama")
    spec, model = tiny.spec_of(tiny.config_of(folder)), load(folder)

    class Failing(ModelSource):
        def read(self, name: str, within: Any, dtype: Any = None) -> torch.Tensor:
            if name == "norm.weight":
                raise OSError("no space left on device")
            return super().read(name, within, dtype)

    with pytest.raises(SpecError, match="cannot be written: no space left"):
        save_folder(spec, Failing(model), tmp_path / "out" / "here")
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(SpecError, match="is there already"):
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
