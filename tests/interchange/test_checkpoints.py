"""From a folder to a model in memory by `load_hf`, a checkpoint, and back to a folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe.export.hub import CheckpointSource, origin_files
from moe.interchange import library
from moe.interchange.load import load_weights
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.spec import LanguageModelSpec, SpecError
from moe.storage.folder import Folder
from moe.train.checkpoint.shards import ShardWriter
from tests.interchange import tiny


@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe"])
def test_a_checkpoints_tensors_are_written_as_the_hub_has_them(family: str, tmp_path: Path):
    folder = tiny.folder_of(tiny.theirs(family), tmp_path / "hub")
    spec = tiny.spec_of(tiny.config_of(folder))
    model = tiny.blank(spec)
    load_weights(str(folder), model, spec)
    checkpoint = Folder(str(tmp_path / "checkpoint"))
    writer = ShardWriter({f"model.{name}": each.detach() for name, each in model.state_dict().items()})
    writer.stage()
    writer.finish(checkpoint, [writer.write(checkpoint)])
    for path, content in origin_files(Origin.of_folder(str(folder), spec)).items():
        checkpoint.write(path, content)
    origin = Origin.of_files(lambda path: checkpoint.read(f"origin/{path}"))
    facts = {"name": "translate", "Steps": "3 of 4"}
    save_folder(spec, CheckpointSource(checkpoint), tmp_path / "out", origin=origin, facts=facts)
    tiny.same_tensors(tiny.tensors_of(folder), tiny.tensors_of(tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# translate" in card
    assert "- Steps: 3 of 4" in card
    assert f"- Began with: the weights of `{folder}`" in card


def test_the_librarys_calls_are_each_others_inverse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Our language models come from another part of the library; here they need not compute.
    def build(spec: LanguageModelSpec, *_: Any, **__: Any) -> nn.Module:
        return tiny.blank(spec)

    monkeypatch.setattr(library, "build_model", build)
    folder = tiny.folder_of(tiny.theirs("minimax_m2"), tmp_path / "hub")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    model = library.load_hf(folder)
    library.save_hf(model, tmp_path / "out")
    tiny.same_tensors(tiny.tensors_of(folder), tiny.tensors_of(tmp_path / "out"))
    assert (tmp_path / "out" / "generation_config.json").is_file()
    with pytest.raises(SpecError, match="spec is required"):
        library.save_hf(tiny.blank(model.hugging_face.spec), tmp_path / "other")
    library.save_hf(model, tmp_path / "anew", spec=model.hugging_face.spec, dtype=torch.float32)
    assert tiny.config_of(tmp_path / "anew")["dtype"] == "float32"
