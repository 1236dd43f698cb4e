"""From a folder to a model in memory by `load_hf`, a checkpoint, and back to a folder."""

import json
from pathlib import Path

import pytest
import torch

from moe.export.hub import CheckpointSource
from moe.export.hugging_face import load_hf, save_hf
from moe.interchange.load import load_weights
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.storage.folder import Folder
from moe.train.checkpoint.shards import ShardWriter
from tests.interchange import tiny
from tests.refusals import expect_problem


@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe"])
def test_a_checkpoints_tensors_are_written_as_the_hub_has_them(family: str, tmp_path: Path):
    folder = tiny.folder_of(tiny.their_model(family), tmp_path / "hub")
    spec = tiny.spec_of(tiny.config_of(folder))
    model = tiny.blank(spec)
    load_weights(str(folder), model, spec)
    checkpoint = Folder(str(tmp_path / "checkpoint"))
    writer = ShardWriter({f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()})
    writer.stage()
    writer.finish(checkpoint, [writer.write(checkpoint)])
    for path, content in Origin.of_folder(str(folder), spec).to_files().items():
        checkpoint.write(f"tokenizers/{path}", content)
    origin = Origin.of_files(lambda path: checkpoint.read(f"tokenizers/{path}"))
    facts = {"name": "translate", "Steps": "3 of 4"}
    save_folder(spec, CheckpointSource(checkpoint), tmp_path / "out", origin=origin, facts=facts)
    tiny.same_tensors(tiny.tensors_of(folder), tiny.tensors_of(tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# translate" in card
    assert "- Steps: 3 of 4" in card
    assert f"- Started from: the weights of `{folder.name}`" in card


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", sorted(tiny.CONFIGS))
def test_load_hf_and_save_hf_are_inverse(family: str, tmp_path: Path):
    folder = tiny.folder_of(tiny.their_model(family), tmp_path / "hub", dtype=torch.float32)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    model = load_hf(folder, dtype=torch.float64)
    save_hf(model, tmp_path / "out")
    tiny.same_tensors(tiny.tensors_of(folder), tiny.tensors_of(tmp_path / "out"))
    with expect_problem("missing", "spec", None):
        save_hf(tiny.blank(model.hugging_face.spec), tmp_path / "other")
    save_hf(model, tmp_path / "anew", spec=model.hugging_face.spec, dtype=torch.bfloat16)
    assert tiny.config_of(tmp_path / "anew")["dtype"] == "bfloat16"
