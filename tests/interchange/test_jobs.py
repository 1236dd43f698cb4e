"""A job that starts from a folder, and its checkpoint exported as a folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe.data.sequences import ModelTokenizer
from moe.export.hub import save_checkpoint_as_folder
from moe.export.trained_model import TrainedModel
from moe.interchange.expand import expand
from moe.parallel import quant_schemes_of
from moe.spec import JobSpec, SpecError
from moe.spec.adapter import describe_base
from moe.storage.folder import Folder
from moe.tasks.language.pretrained import model_tokenizer, unknown_family_notes
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.checkpointer import CheckpointError
from moe.train.checkpoint.copying import copy_checkpoint
from moe.train.checkpoint.parts import StoredParts
from tests.interchange import tiny
from tests.interchange.test_tokenizer import FILE, RANKS
from tests.refusals import expect_problem
from tests.unit.language_runs import documents, language_job
from tests.unit.train_runs import RequestAfter, course, run

MIXTRAL = {"num_experts": 4, "hidden_dim": 24, "router": "softmax_topk", "top_k": 2, "activation": "swiglu",
           "group_tokens": 128}  # fmt: skip


def with_tiktoken(folder: Path, *special: str, **config: Any) -> Path:
    """Add a tiktoken file and these special tokens to a model's folder."""
    (folder / "tiktoken.model").write_bytes(FILE)
    decoder = {str(len(RANKS) + index): {"content": name} for index, name in enumerate(special)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder, **config}))
    return folder


def mixtral(
    folder: Path, tokenizer_config: dict[str, Any] | None = None, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Path:
    tiny.folder_of(tiny.their_model("mixtral", vocab_size=640), folder, dtype=dtype)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**tiny.config_of(folder), **changes}))
    return with_tiktoken(folder, "[BOS]", "[EOS]", **(tokenizer_config or {}))


def further(
    folder: Path, tmp_path: Path, num_steps: int = 4, moe: dict[str, Any] | None = None, **model: Any
) -> JobSpec:
    """A job that continues training a folder's model."""
    fields = {
        "name": "further", "data": documents(tmp_path / "data"),
        "model": {"from": str(folder), "moe": {"group_tokens": 128, **(moe or {})}, **model},
        "train": {"num_steps": num_steps, "batch_tokens": 128, "optimizer": {"name": "adamw", "peak_lr": 1e-2}},
        "resources": {"num_workers": 1}, "checkpoint": {"every_steps": 2},
    }  # fmt: skip
    return JobSpec.parse(expand(fields, None))


def stored_in(storage: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    (checkpoint,) = (path for path in (storage / "checkpoints").glob(f"step-{step:08}*") if path.is_dir())
    return checkpoint


def with_adapter(spec: JobSpec, **adapter: Any) -> JobSpec:
    return JobSpec.parse({**spec.model_dump(mode="json"), "adapter": adapter})


@pytest.mark.slow
def test_a_folder_is_trained_and_exported_again(tmp_path: Path):
    folder = tiny.folder_of(tiny.their_model("deepseek_v3", vocab_size=640), tmp_path / "hub")
    with_tiktoken(folder, "[BOS]")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    run(further(folder, tmp_path, 2, {"bias_update_rate": 0.01}), tmp_path / "storage", tmp_path / "cache")
    save_checkpoint_as_folder(str(stored_in(tmp_path / "storage", 2)), tmp_path / "out")
    before, after = tiny.tensors_of(folder), tiny.tensors_of(tmp_path / "out")
    forms = [{name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} for tensors in (before, after)]
    assert forms[0] == forms[1]
    changed_names = [name for name in before if not torch.equal(before[name], after[name])]
    assert any(name.endswith("e_score_correction_bias") for name in changed_names)
    assert any(".experts.3.down_proj" in name for name in changed_names)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("the").input_ids == [RANKS[b"the"]]
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").is_file()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- Steps: 2 of 2" in card
    assert "- Started from: the weights of `hub`" in card
    assert str(tmp_path) not in card, "where data and weights lie is the operator's business"


@pytest.mark.slow
@pytest.mark.parametrize("coefficient", [0.0, 1.0])
def test_an_indexer_is_trained_by_its_loss_alone_and_exported(tmp_path: Path, coefficient: float):
    """Rows of 64 tokens attend to six; the second of three layers shares the first one's selection. Resumed after the
    second step of four."""
    folder = tiny.folder_of(tiny.their_model("glm_moe_dsa", vocab_size=640), tmp_path / "hub")
    with_tiktoken(folder, "[BOS]")
    spec = further(folder, tmp_path, attention={"indexer": {"loss_coefficient": coefficient}})
    _, full_run = run(spec, tmp_path / "whole", tmp_path / "cache")
    run(spec, tmp_path / "paused", tmp_path / "cache", control=RequestAfter("pause", 2))
    _, second_half = run(spec, tmp_path / "paused", tmp_path / "cache", attempt=2)
    assert course(second_half) == course(full_run)[2:]
    losses = [record.indexer_loss for record in full_run.metrics]
    assert all(loss > 0 if coefficient else loss is None for loss in losses)
    for record in full_run.metrics:
        assert record.loss == pytest.approx(record.nll + 2 * coefficient * (record.indexer_loss or 0.0), rel=1e-5)
    save_checkpoint_as_folder(str(stored_in(tmp_path / "whole", 4)), tmp_path / "out")
    before, after = tiny.tensors_of(folder), tiny.tensors_of(tmp_path / "out")
    changed_names = {name for name in before if not torch.equal(before[name], after[name])}
    indexer_names = {name for name in before if ".indexer." in name}
    assert len(indexer_names) == 2 * 5
    assert changed_names & indexer_names == (indexer_names if coefficient else set())
    assert any("q_b_proj" in name for name in changed_names)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.slow
def test_a_run_resumes_without_its_folder_and_with_a_changed_license(tmp_path: Path):
    folder = mixtral(tmp_path / "hub")
    (folder / "LICENSE").write_text("as you like")
    spec = further(folder, tmp_path)
    _, full_run = run(spec, tmp_path / "whole", tmp_path / "cache")
    for name in ("changed", "moved"):
        run(spec, tmp_path / name, tmp_path / "cache", control=RequestAfter("pause", 2))
    (folder / "LICENSE").write_text("as you wish")
    outcome, with_change = run(spec, tmp_path / "changed", tmp_path / "cache", attempt=2)
    assert outcome.kind == "succeeded"
    folder.rename(tmp_path / "elsewhere")
    _, without_folder = run(spec, tmp_path / "moved", tmp_path / "other cache", attempt=2)
    assert course(with_change) == course(without_folder) == course(full_run)[2:]
    save_checkpoint_as_folder(str(stored_in(tmp_path / "moved", 4)), tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "as you like", "what the run began with"
    with expect_problem("not_found", "model.from"):
        run(spec, tmp_path / "anew", tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's own use
def test_an_adapter_is_its_checkpoint_and_resumes_beside_the_same_base_only(tmp_path: Path):
    from peft import PeftModel  # takes seconds, in each process that collects this file

    folder = mixtral(tmp_path / "hub", dtype=torch.float32)
    spec = with_adapter(further(folder, tmp_path), rank=2)
    _, full_run = run(spec, tmp_path / "whole", tmp_path / "cache")
    for name in ("resumed", "moved", "changed"):
        run(spec, tmp_path / name, tmp_path / "cache", control=RequestAfter("pause", 2))
    stored_names = StoredParts(Folder(str(stored_in(tmp_path / "moved", 2)))).names()
    assert all(name.endswith(("_lora_a", "_lora_b")) for name in stored_names)
    outcome, resumed_run = run(spec, tmp_path / "resumed", tmp_path / "cache", attempt=2)
    assert outcome.kind == "succeeded"
    assert course(resumed_run) == course(full_run)[2:]
    checkpoint = stored_in(tmp_path / "resumed", 4)
    trained_model = TrainedModel.load(str(checkpoint))

    for merge, name in ((False, "adapter"), (True, "merged")):
        save_checkpoint_as_folder(str(checkpoint), tmp_path / name, merge=merge)
    of_adapter, of_merged = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("adapter", "merged"))
    assert of_adapter("the").input_ids == of_merged("the").input_ids == [RANKS[b"the"]]
    card = (tmp_path / "adapter" / "README.md").read_text()
    for line in ("library_name: peft", "- Base: the weights of `hub`", "- Steps: 4 of 4", "- Loads in: PEFT "):
        assert line in card
    assert str(tmp_path) not in card
    assert "- Loads in: transformers 5 and 4 " in (tmp_path / "merged" / "README.md").read_text()
    base_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(4, 24)[None]
    with torch.no_grad():
        base = base_model(tokens, use_cache=False).logits
        adapter_logits = (
            PeftModel.from_pretrained(base_model, tmp_path / "adapter").eval()(tokens, use_cache=False).logits
        )
        own_logits = trained_model.model(tokens)
        merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
        of_merged = merged_model(tokens, use_cache=False).logits
    change = (base - adapter_logits).abs().mean()
    assert (own_logits - adapter_logits).abs().mean() < 1e-3 * change
    assert (of_merged - adapter_logits).abs().mean() < 1e-3 * change
    run(further(folder, tmp_path), tmp_path / "plain", tmp_path / "cache")
    with pytest.raises(CheckpointError, match="has no adapters"):
        save_checkpoint_as_folder(str(stored_in(tmp_path / "plain", 4)), tmp_path / "none", merge=True)

    checkpoints = Folder(str(checkpoint.parent))
    marker = markers.read(checkpoints, checkpoint.name)
    copy_checkpoint(checkpoints, marker, Folder(str(tmp_path / "started/checkpoints")), lambda: False)
    weights = tiny.tensors_of(folder)
    weights["model.layers.0.self_attn.q_proj.weight"] *= 2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with expect_problem("mismatch", "model.from"):
        run(spec, tmp_path / "changed", tmp_path / "cache", attempt=2)
    fork_fields = {**further(folder, tmp_path, 6).model_dump(mode="json"), "start_from": {"job": "job-another"}}
    with expect_problem("mismatch", "model.from"):
        run(with_adapter(JobSpec.parse(fork_fields), rank=2), tmp_path / "started", tmp_path / "cache")
    for use in (TrainedModel.load, lambda path: save_checkpoint_as_folder(path, tmp_path / "later", merge=True)):
        with pytest.raises((CheckpointError, SpecError), match=r"this job started from those with digest"):
            use(str(checkpoint))
    save_checkpoint_as_folder(str(checkpoint), tmp_path / "again")
    folder.rename(tmp_path / "elsewhere")
    with expect_problem("not_found", "model.from"):
        run(spec, tmp_path / "moved", tmp_path / "cache", attempt=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's own use
@pytest.mark.parametrize(
    "base", [*(pytest.param(dtype, marks=pytest.mark.grid) for dtype in ("bfloat16", "int8")), "nf4"]
)
def test_an_adapter_on_a_quantized_base_resumes_and_is_merged_into_the_folder_s_own_weights(tmp_path: Path, base: str):
    from peft import PeftModel  # takes seconds, in each process that collects this file

    folder = mixtral(tmp_path / "hub", dtype=torch.float32)
    spec = with_adapter(further(folder, tmp_path), rank=2, base=base)
    _, full_run = run(spec, tmp_path / "whole", tmp_path / "cache")
    _, wide = run(with_adapter(further(folder, tmp_path), rank=2), tmp_path / "wide", tmp_path / "cache")
    assert course(full_run) != course(wide)
    run(spec, tmp_path / "resumed", tmp_path / "cache", control=RequestAfter("pause", 2))
    stored_names = StoredParts(Folder(str(stored_in(tmp_path / "resumed", 2)))).names()
    assert all(name.endswith(("_lora_a", "_lora_b")) for name in stored_names)
    _, resumed_run = run(spec, tmp_path / "resumed", tmp_path / "cache", attempt=2)
    assert course(resumed_run) == course(full_run)[2:]
    assert describe_base(spec.model.parameters(), 4) in [log["message"] for log in full_run.logs]
    with expect_problem("conflict", "model.adapter.base", "float32"):
        run(with_adapter(further(folder, tmp_path), rank=2), tmp_path / "resumed", tmp_path / "cache", attempt=3)

    checkpoint = stored_in(tmp_path / "resumed", 4)
    save_checkpoint_as_folder(str(checkpoint), tmp_path / "merged", merge=True)
    before, merged_tensors = tiny.tensors_of(folder), tiny.tensors_of(tmp_path / "merged")
    parts = StoredParts(Folder(str(checkpoint)))
    name, query = "layers.1.attention.query.weight", "model.layers.1.self_attn.q_proj.weight"
    a, b = (parts.read(f"model.{name}{part}", tuple((0, size) for size in parts.shape(f"model.{name}{part}")))
            for part in ("_lora_a", "_lora_b"))  # fmt: skip
    assert torch.equal(merged_tensors[query], before[query] + b @ a)
    assert torch.equal(merged_tensors["model.embed_tokens.weight"], before["model.embed_tokens.weight"])

    save_checkpoint_as_folder(str(checkpoint), tmp_path / "adapter")
    base_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs_merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    model = TrainedModel.load(str(checkpoint)).model
    assert {parameter.form for parameter in spec.model.parameters() if parameter.name in quant_schemes_of(model)} == {
        base
    }
    tokens = torch.arange(4, 24)[None]
    with torch.no_grad():
        own_logits, of_merged = model(tokens), theirs_merged(tokens, use_cache=False).logits
        adapter_logits = (
            PeftModel.from_pretrained(base_model, tmp_path / "adapter").eval()(tokens, use_cache=False).logits
        )
    apart = (own_logits - of_merged).abs().mean()
    assert (adapter_logits - of_merged).abs().mean() < 1e-3 * apart, (
        "apart by what the base has lost, and by that alone"
    )


EOS = len(RANKS) + 1


@pytest.mark.parametrize(
    ("config_eos", "generation", "tokenizer", "eos", "ends"),
    [
        (7, None, {}, 7, ()),
        ([7, 9, 11], None, {}, 7, (9, 11)),
        ([7, 9], {"eos_token_id": [11, 7]}, {}, 7, (11,)),
        ([7, 9], {"eos_token_id": 8}, {}, 7, (8,)),
        ([7, 9], {"do_sample": True}, {}, 7, (9,)),
        (None, {"eos_token_id": [8, 7]}, {"eos_token": "[EOS]"}, 8, (7,)),
        (None, None, {"eos_token": "[EOS]"}, EOS, ()),
        ([], None, {"eos_token": {"content": "[EOS]"}}, EOS, ()),
        (None, None, {"eos_token": "nothing"}, None, ()),
        (None, None, {}, None, ()),
    ],
)  # fmt: skip
def test_end_tokens_are_those_of_transformers(tmp_path: Path, config_eos, generation, tokenizer, eos, ends):
    folder = mixtral(tmp_path / "hub", tokenizer, eos_token_id=config_eos)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    spec = further(folder, tmp_path).model
    if eos is None:
        with expect_problem("missing", "model.from"):
            model_tokenizer(spec, None)
        return
    own_tokenizer = model_tokenizer(spec, None)
    assert (own_tokenizer.eos_id, own_tokenizer.ends) == (eos, ends)
    reference_ids = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    if reference_ids is not None:  # their models do not know of a tokenizer's end token
        assert {eos, *ends} >= set(reference_ids if isinstance(reference_ids, list) else [reference_ids])
    assert ModelTokenizer.of_files(own_tokenizer.all_files()) == replace(own_tokenizer, files=dict(own_tokenizer.files))


def test_a_model_from_random_weights_exports_its_longest_text(tmp_path: Path):
    spec = language_job(documents(tmp_path / "data"), num_steps=2, model={"moe": MIXTRAL})
    run(spec, tmp_path / "storage", tmp_path / "cache")
    save_checkpoint_as_folder(str(stored_in(tmp_path / "storage", 2)), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"]) == ("mixtral", spec.data.max_tokens)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- Started from: random weights" in card
    assert '"paths": ["*.py"]' in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(("activation", "has_family"), [("swiglu", True), ("relu", False)])
def test_a_model_of_no_family_is_reported_before_it_is_trained(activation: str, has_family: bool, tmp_path: Path):
    spec = language_job(documents(tmp_path / "data"), model={"moe": {**MIXTRAL, "activation": activation}}).model
    warnings = unknown_family_notes(spec)
    assert bool(warnings) is not has_family
    assert has_family or "nearest is mixtral, which cannot express the model: " in "".join(warnings)
