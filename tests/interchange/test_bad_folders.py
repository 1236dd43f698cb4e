"""Faults of a folder are reported, at once where headers show them, and nothing is half loaded."""

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
from tests.interchange import tiny
from tests.interchange.folders import load, reconfigure, refusal, rewrite
from tests.refusals import expect_problem


def test_all_tensors_that_do_not_fit_are_reported_at_once(hub: Callable[..., Path]):
    folder = hub("mixtral")
    experts = "model.layers.0.block_sparse_moe.experts"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{experts}.1.w1.weight"] = torch.zeros(20, 25)
        del tensors[f"{experts}.2.w2.weight"]
        tensors["model.layers.9.extra"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.zeros(24, dtype=torch.int32)

    rewrite(folder, change)
    problems = {problem.path.rpartition(":")[2]: problem for problem in refusal(folder).problems}
    assert {name: (problem.code, problem.value) for name, problem in problems.items()} == {
        f"{experts}.1.w1.weight": ("shape_mismatch", [20, 25]), f"{experts}.2.w2.weight": ("missing", None),
        "model.layers.9.extra": ("unknown_key", [3]), "model.norm.weight": ("dtype_mismatch", "I32"),
    }  # fmt: skip
    assert "w_gate [4, 24, 20]" in problems[f"{experts}.1.w1.weight"].rule


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "minimax_m2", "qwen3_moe"])
def test_layers_that_a_config_or_spec_leaves_out_are_no_heads(family: str, hub: Callable[..., Path]):
    """A wrong number of layers would cut a model off."""
    folder = hub(family)
    assert any("model.layers.2." in problem.path for problem in refusal(folder, num_layers=2).problems)
    reconfigure(folder, num_hidden_layers=2)
    assert any("model.layers.2." in problem.path for problem in refusal(folder).problems)


def test_more_experts_than_a_folder_can_have_are_refused_before_each_is_named(hub: Callable[..., Path]):
    folder = hub("mixtral")
    reconfigure(folder, num_local_experts=1_000_000, num_hidden_layers=10_000)
    with expect_problem("mismatch", f"{folder}/config.json"):
        fit(tiny.spec_of(tiny.config_of(folder)), catalog(HubFolder(str(folder), None)))


def test_an_index_names_safetensors_files_of_its_own_folder(hub: Callable[..., Path]):
    folder = hub("llama")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "elsewhere.safetensors"}}')
    load(folder)  # one file is preferred to an index, as in transformers
    with expect_problem("invalid_value", "model.from"):
        HubFolder(f"{folder.parent}/*", None)
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    for name in ("../llama/one.safetensors", "*.safetensors", "\ud800.safetensors", "one.bin"):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        assert "which is not a .safetensors file of this folder" in str(refusal(folder))


def test_an_export_follows_its_path_and_replaces_no_link(hub: Callable[..., Path], tmp_path: Path):
    spec = tiny.spec_of(tiny.config_of(hub("llama")))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with expect_problem("not_allowed", "target"):
        save_folder(spec, ModelSource(tiny.blank(spec)), tmp_path / "link")
    (tmp_path / "here").mkdir()
    save_folder(spec, ModelSource(tiny.blank(spec)), tmp_path / "here/../out")
    assert (tmp_path / "out/config.json").is_file()


def test_logits_that_are_missing_are_told(hub: Callable[..., Path]):
    folder = hub("mixtral")
    rewrite(folder, lambda tensors: tensors.__delitem__("lm_head.weight"))
    assert "tie_word_embeddings" in str(refusal(folder))


class _Bomb:
    gone_off = False

    def __reduce__(self) -> Any:
        return setattr, (_Bomb, "gone_off", True)


def test_pickles_are_refused_and_never_loaded(hub: Callable[..., Path]):
    folder = hub("llama")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb()))
    problem = refusal(folder).problems[0]
    assert problem.path == "model.from"
    assert "pytorch_model.bin" in problem.rule
    assert "never loaded" in problem.rule
    assert not _Bomb.gone_off


@pytest.mark.parametrize("size", [0, 5, 100, -1000, -1])
def test_a_truncated_file_is_reported_with_the_tensor_that_it_ends_in(size: int, hub: Callable[..., Path]):
    path = hub("llama") / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:size])
    problem = refusal(path.parent).problems[0]
    assert problem.value.endswith("model.safetensors")
    assert "truncated" in problem.rule
    if size < 0:
        first, header = _header(content)
        end = len(content) + size - first
        name = next(
            name for name, entry in header.items() if entry["data_offsets"][0] <= end < entry["data_offsets"][1]
        )
        assert repr(name) in problem.rule


def _header(content: bytes) -> tuple[int, dict[str, Any]]:
    """Offset of the first tensor, and the header's entry for each."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    return 8 + length, header


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
def test_an_impossible_header_is_refused(change: Callable[[dict[str, Any]], Any], hub: Callable[..., Path]):
    path = hub("llama") / "model.safetensors"
    content = path.read_bytes()
    first, header = _header(content)
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[first:])
    with expect_problem("corrupt", "model.from"):
        load(path.parent)


def test_a_file_that_cannot_be_read_is_not_called_corrupt(hub: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    def raw(location: Location) -> IO[bytes]:
        raise OSError(errno.EIO, "Input/output error")

    files = HubFolder(str(hub("llama")), None).weight_files()
    monkeypatch.setattr(Location, "raw", raw)  # stands for a failing disk
    for name, location in files.items():
        with expect_problem("unreadable", "model.from"):
            entries(name, location, "model.from")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_no_numbers_are_told_with_file_and_tensor(value: float, hub: Callable[..., Path]):
    folder = hub("granitemoe")
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    rewrite(folder, lambda tensors: tensors[name][1, 2].fill_(value))
    problems = refusal(folder).problems
    assert [problem.path for problem in problems] == [f"{folder}/model.safetensors:{name}"]


@pytest.mark.parametrize("end", ["first", "last"])
def test_a_flipped_bit_in_an_export_is_reported(end: str, hub: Callable[..., Path], tmp_path: Path):
    folder, out = hub("mixtral"), tmp_path / "out"
    save_folder(tiny.spec_of(tiny.config_of(folder)), ModelSource(load(folder)), out, max_shard_bytes=20_000)
    load(out)
    path = sorted(out.glob("model-*"))[2]
    content = bytearray(path.read_bytes())
    first, header = _header(bytes(content))
    names = sorted(header, key=lambda name: header[name]["data_offsets"][0])
    content[first if end == "first" else len(content) - 2] ^= 1
    path.write_bytes(content)
    (problem,) = refusal(out).problems
    assert problem.path == f"{path}:{names[0 if end == 'first' else -1]}"
    assert "checksum" in problem.rule


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
