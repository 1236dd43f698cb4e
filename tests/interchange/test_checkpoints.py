"""From a folder to a model in memory by `load_hf`, a checkpoint, and back to a folder."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from moe.export.hub import CheckpointSource
from moe.export.hugging_face import load_hf, save_hf
from moe.interchange.load import load_weights
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.storage.folder import Folder
from moe.train.checkpoint.shards import ShardWriter
from tests.interchange import tiny
from tests.refusals import refused


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


@pytest.fixture(scope="module", params=sorted(tiny.CONFIGS))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A folder of each family, and our model of it."""
    folder = tmp_path_factory.mktemp(request.param) / "hub"
    tiny.folder_of(tiny.theirs(request.param), folder, dtype=torch.float32)
    return folder, load_hf(folder, dtype=torch.float64)


def test_a_folders_model_computes_what_transformers_does(loaded: tuple[Path, nn.Module]):
    folder, model = loaded
    tokens = torch.arange(24).view(2, 12) * 7 % 48
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        expected = theirs.eval()(tokens, use_cache=False).logits
        found = model.eval()(tokens)
    assert float((found - expected).abs().max()) < 2e-3 * float(expected.abs().max())


def test_the_librarys_calls_are_each_others_inverse(loaded: tuple[Path, nn.Module], tmp_path: Path):
    folder, model = loaded
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    save_hf(model, tmp_path / "out")
    tiny.same_tensors(tiny.tensors_of(folder), tiny.tensors_of(tmp_path / "out"))
    with refused("missing", "spec", None):
        save_hf(tiny.blank(model.hugging_face.spec), tmp_path / "other")
    save_hf(model, tmp_path / "anew", spec=model.hugging_face.spec, dtype=torch.bfloat16)
    assert tiny.config_of(tmp_path / "anew")["dtype"] == "bfloat16"
