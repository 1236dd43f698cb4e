"""What is wrong with a folder is told, at once where headers tell it, and nothing is half loaded."""

import errno
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from moe.data.locations import Location
from moe.interchange.catalog import catalog
from moe.interchange.fitting import fit
from moe.interchange.headers import entries
from moe.interchange.hub_folder import HubFolder
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource
from moe.spec import SpecError
from tests.interchange import tiny
from tests.interchange.folders import load, reconfigure, refusal, rewrite
from tests.refusals import refused


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
    assert "is not a tensor of this model" in told["model.layers.9.extra"].rule
    assert told["model.norm.weight"].value == "I32"


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "minimax_m2", "qwen3_moe"])
def test_layers_that_a_config_leaves_out_are_no_heads(family: str, hub: Callable[..., Path]):
    """A number of layers that is wrong would cut a model off."""
    folder = hub(family)
    reconfigure(folder, num_hidden_layers=2)
    assert any("model.layers.2." in problem.path for problem in refusal(folder).problems)


def test_more_experts_than_a_folder_can_have_are_refused_before_each_is_named(hub: Callable[..., Path]):
    folder = hub("mixtral")
    reconfigure(folder, num_local_experts=1_000_000, num_hidden_layers=10_000)
    spec = tiny.spec_of(tiny.config_of(folder))
    with pytest.raises(SpecError) as raised:
        fit(spec, catalog(HubFolder(str(folder), None)))
    (problem,) = raised.value.problems
    assert problem.path == f"{folder}/config.json"
    assert "would have 10,000,000,000 experts in all layers, but the folder has " in problem.rule


def test_a_model_with_fewer_layers_than_its_folder_is_refused(hub: Callable[..., Path]):
    folder = hub("deepseek_v3")
    assert any("model.layers.2." in problem.path for problem in refusal(folder, num_layers=2).problems)


def test_a_name_that_means_several_folders_or_files_is_refused(hub: Callable[..., Path]):
    folder = hub("llama")
    with refused("invalid_value", "model.from"):
        HubFolder(f"{folder.parent}/*", None)
    index = {"weight_map": {"model.norm.weight": "*.safetensors"}}
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "which is not a .safetensors file of this folder" in str(refusal(folder))


def test_one_file_is_preferred_to_an_index_as_others_do(hub: Callable[..., Path]):
    folder = hub("llama")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "elsewhere.safetensors"}}')
    load(folder)


def test_an_export_takes_no_links_place(hub: Callable[..., Path], tmp_path: Path):
    spec = tiny.spec_of(tiny.config_of(hub("llama")))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with refused("not_allowed", "target"):
        save_folder(spec, ModelSource(tiny.blank(spec)), tmp_path / "link")


def test_a_place_whose_path_goes_up_is_written(hub: Callable[..., Path], tmp_path: Path):
    (tmp_path / "here").mkdir()
    spec = tiny.spec_of(tiny.config_of(hub("mixtral")))
    save_folder(spec, ModelSource(tiny.blank(spec)), tmp_path / "here/../out")
    assert (tmp_path / "out/config.json").is_file()


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
    assert "truncated" in problem.rule
    if keep < 0:
        (length,) = struct.unpack("<Q", content[:8])
        end = len(content) + keep - 8 - length
        within = [
            name for name, told in _header(content).items() if told["data_offsets"][0] <= end < told["data_offsets"][1]
        ]
        assert repr(within[0]) in problem.rule


def _header(content: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", content[:8])
    found = json.loads(content[8 : 8 + length])
    found.pop("__metadata__", None)
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update(model=[]),
        lambda header: header["model.norm.weight"].update(dtype="Q7"),
        lambda header: header["model.norm.weight"].update(dtype=["F32"]),
        lambda header: header["model.norm.weight"].update(shape=[-1, -48]),
        lambda header: header["model.norm.weight"].update(shape=[23]),
        lambda header: header["model.norm.weight"]["data_offsets"].__setitem__(0, True),
        lambda header: header.pop("model.norm.weight"),
    ],
)
def test_a_header_that_cannot_be_is_refused(change: Callable[[dict[str, Any]], Any], hub: Callable[..., Path]):
    folder = hub("llama")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    with refused("corrupt", "model.from"):
        load(folder)


def test_a_file_that_cannot_be_read_is_not_called_corrupt(hub: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    def raw(location: Location) -> IO[bytes]:
        raise OSError(errno.EIO, "Input/output error")

    files = HubFolder(str(hub("llama")), None).weight_files()
    monkeypatch.setattr(Location, "raw", raw)  # a disk that fails, which no test can have
    for name, location in files.items():
        with refused("unreadable", "model.from"):
            entries(name, location, "model.from")


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
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    for name in ("../llama/one.safetensors", "*.safetensors", "\ud800.safetensors", "one.bin"):
        index = {"weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "which is not a .safetensors file of this folder" in str(refusal(folder))


def test_what_is_named_as_a_small_file_and_is_none_is_not_taken_along(hub: Callable[..., Path]):
    folder = hub("llama")
    (folder / "LICENSE").mkdir()
    (folder / "NOTICE").symlink_to("nowhere")
    load(folder)
    assert not {"LICENSE", "NOTICE"} & Origin.of_folder(str(folder), tiny.spec_of(tiny.config_of(folder))).files.keys()


def test_float8_without_scales_and_other_quantisations_are_refused(hub: Callable[..., Path]):
    folder = hub("llama")
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    summaries = {(problem.code, problem.path, problem.value) for problem in refusal(folder).problems}
    assert summaries == {("dtype_mismatch", f"{folder}/model.safetensors:{name}", "F8_E4M3")}
    for method in ("gptq", "awq", "bitsandbytes", "mxfp4"):
        reconfigure(folder, quantization_config={"quant_method": method})
        assert f"quant_method (='{method}')" in str(refusal(folder))
