"""A job that begins with a folder, and its checkpoint as one again."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe.export.hub import save_checkpoint_as_folder
from moe.interchange.expand import expand
from moe.spec import JobSpec, LanguageModelSpec
from moe.tasks.language.pretrained import of_no_family
from tests.interchange import tiny
from tests.interchange.test_tokenizer import FILE, RANKS
from tests.unit.language_runs import documents, language_job
from tests.unit.train_runs import run

MIXTRAL = {"num_experts": 4, "hidden_dim": 24, "router": "softmax_topk", "top_k": 2, "activation": "swiglu",
           "group_tokens": 128}  # fmt: skip


def test_a_folder_is_trained_and_given_back(tmp_path: Path):
    folder = tiny.folder_of(tiny.theirs("deepseek_v3", vocab_size=640), tmp_path / "hub")
    (folder / "tiktoken.model").write_bytes(FILE)
    special = {str(len(RANKS)): {"content": "[BOS]", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": special}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    given = {
        "name": "further", "data": documents(tmp_path / "data"),
        "model": {"from": str(folder), "moe": {"bias_update_rate": 0.01, "group_tokens": 128}},
        "train": {"num_steps": 2, "batch_tokens": 128, "optimizer": {"name": "adamw", "peak_lr": 1e-2}},
        "resources": {"num_workers": 1}, "checkpoint": {"every_steps": 2},
    }  # fmt: skip
    run(JobSpec.parse(expand(given, None)), tmp_path / "storage", tmp_path / "cache")
    checkpoint = next(
        path for path in (tmp_path / "storage" / "checkpoints").glob("step-00000002*") if path.is_dir()
    )
    save_checkpoint_as_folder(str(checkpoint), tmp_path / "out")
    before, after = tiny.tensors_of(folder), tiny.tensors_of(tmp_path / "out")
    assert {name: (each.dtype, each.shape) for name, each in before.items()} == {
        name: (each.dtype, each.shape) for name, each in after.items()
    }
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert any(name.endswith("e_score_correction_bias") for name in changed)
    assert any(".experts.3.down_proj" in name for name in changed)
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("the").input_ids == [RANKS[b"the"]]
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").is_file()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- Steps: 2 of 2" in card
    assert "- Began with: the weights of `hub`" in card
    assert str(tmp_path) not in card, "where data and weights lie is the operator's business"


def test_a_model_from_nothing_says_how_long_its_texts_were(tmp_path: Path):
    spec = language_job(documents(tmp_path / "data"), num_steps=2, model={"moe": MIXTRAL})
    run(spec, tmp_path / "storage", tmp_path / "cache")
    (checkpoint,) = (
        each for each in (tmp_path / "storage/checkpoints").glob("step-00000002*") if each.is_dir()
    )
    save_checkpoint_as_folder(str(checkpoint), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"]) == ("mixtral", spec.data.max_tokens)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- Began with: random weights" in card
    assert '"paths": ["*.py"]' in card
    assert str(tmp_path) not in card


def test_a_model_of_no_family_is_told_before_it_is_trained(tmp_path: Path):
    for moe, told in (
        (MIXTRAL, ""),
        ({**MIXTRAL, "activation": "relu"}, "nearest is mixtral, which cannot say it: "),
    ):
        spec = language_job(documents(tmp_path / "data"), model={"moe": moe}).model
        assert isinstance(spec, LanguageModelSpec)
        assert told in "".join(of_no_family(spec))
        assert bool(of_no_family(spec)) == bool(told)
