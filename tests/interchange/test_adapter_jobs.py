"""Jobs that train adapters of tables, DoRA and rows of tokens: checkpoints, resumption, and exports that PEFT and
transformers load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe.export.hub import save_checkpoint_as_folder
from moe.export.trained_model import TrainedModel
from moe.interchange.expand import expand
from moe.spec import JobSpec
from moe.storage.folder import Folder
from moe.train.checkpoint.parts import StoredParts
from tests.interchange import tiny
from tests.interchange.test_jobs import further, mixtral, stored_in, with_adapter
from tests.interchange.test_tokenizer import RANKS
from tests.unit.train_runs import RequestAfter, course, run

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
ADAPTERS: dict[str, dict[str, Any]] = {
    "dora and tokens": {
        "targets": ["*.attention.*", "output.weight"], "dora": True, "dropout": 0.1,
        "trainable_token_indices": {"embedding": [5, 300, 7]},
    },
    "tables": {"targets": ["*.attention.*", "*.experts.*", "embedding.weight", "output.weight"]},
    "quantized dora and tokens of both tables": {
        "targets": ["*.attention.*"], "dora": True, "base": "nf4",
        "trainable_token_indices": {"embedding": [9, 4], "output": [4]},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_job_resumes_and_its_exports_load(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel  # takes seconds, in each process that collects this file

    folder, cache = mixtral(tmp_path / "hub", dtype=torch.float32), tmp_path / "cache"
    spec = with_adapter(further(folder, tmp_path), rank=2, **ADAPTERS[kind])
    _, full_run = run(spec, tmp_path / "full", cache)
    run(spec, tmp_path / "resumed", cache, control=RequestAfter("pause", 2))
    stored_names = set(StoredParts(Folder(str(stored_in(tmp_path / "resumed", 2)))).names())
    trained = {parameter.name for parameter in spec.model.parameters() if not parameter.frozen}
    assert {name.removeprefix("model.") for name in stored_names if name.startswith("model.")} == trained
    _, resumed_run = run(spec, tmp_path / "resumed", cache, attempt=2)
    assert course(resumed_run) == course(full_run)[2:]

    checkpoint = str(stored_in(tmp_path / "resumed", 4))
    for merge, name in ((False, "adapter"), (True, "merged")):
        save_checkpoint_as_folder(checkpoint, tmp_path / name, merge=merge)
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter")("the").input_ids == [RANKS[b"the"]]
    card = ModelCard.load(tmp_path / "adapter" / "README.md").data.to_dict()
    assert card["base_model"] == "hub"
    assert (card["library_name"], card["pipeline_tag"]) == ("peft", "text-generation")
    assert card["tags"] == ["base_model:adapter:hub", "lora", "transformers"]
    tokens = torch.arange(4, 24)[None]
    own = TrainedModel.load(checkpoint).model
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        plain = base(tokens, use_cache=False).logits
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(tokens, use_cache=False).logits
        change, of_merged, own_logits = (theirs - plain).abs().mean(), merged(tokens).logits, own(tokens)
    assert (of_merged - theirs).abs().mean() < 1e-3 * change
    if "base" not in ADAPTERS[kind]:
        assert (own_logits - theirs).abs().mean() < 1e-3 * change

    fields = {**further(folder, tmp_path).model_dump(mode="json"), "adapter": {"from": str(tmp_path / "adapter")}}
    still = JobSpec.parse(expand(fields, None))
    optimizer = still.train.optimizer.model_copy(update={"peak_lr": 1e-30})
    still = still.model_copy(update={"train": still.train.model_copy(update={"optimizer": optimizer})})
    run(still, tmp_path / "still", cache)
    save_checkpoint_as_folder(str(stored_in(tmp_path / "still", 4)), tmp_path / "same")
    tiny.same_tensors(tiny.tensors_of(tmp_path / "adapter"), tiny.tensors_of(tmp_path / "same"))
