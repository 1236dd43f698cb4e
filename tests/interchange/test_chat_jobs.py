"""Jobs on conversations and preferences, beside a folder with a chat template."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.export.hub import save_checkpoint_as_folder
from moe.interchange.expand import expand
from moe.records import LanguageReport
from moe.spec import JobSpec, SpecError
from moe.storage.folder import Folder
from moe.tasks.build import build_task
from moe.train.checkpoint.marker import list_committed
from tests.interchange import tiny
from tests.refusals import refused
from tests.unit import chats
from tests.unit.train_runs import RequestAfter, course, run


def chat_folder(folder: Path) -> Path:
    """A mixtral with a tokenizer of special tokens, and a chat template."""
    tiny.folder_of(tiny.theirs("mixtral", vocab_size=480), folder, dtype=torch.float32)
    for name, content in chats.tokenizer_files(chats.STRUCTURES["llama"].source).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.sample(1)
@pytest.mark.parametrize("corpus", ["chat", "preference"])
def test_conversations_are_learned_paused_and_gone_on_with(corpus: str, tmp_path: Path):
    folder, rng = chat_folder(tmp_path / "hub"), random.Random(corpus)
    (tmp_path / "data").mkdir()
    rows = [chats.conversation(rng, chats.STRUCTURES["llama"]) for _ in range(80)]
    if corpus == "preference":
        rows = [{"prompt": row["messages"][:-1], "chosen": row["messages"][-1:],
                 "rejected": [{"role": "assistant", "content": "no"}]} for row in rows]  # fmt: skip
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "name": "tuned", "model": {"from": str(folder), "moe": {"group_tokens": 512}}, "adapter": {"rank": 2},
        "data": {"corpus": corpus, "paths": [f"{tmp_path}/data/*"], "max_tokens": 512, "held_out": 0.2},
        "train": {"num_steps": 4, "batch_tokens": 1024, "optimizer": {"name": "adamw", "peak_lr": 2e-2}},
        "resources": {"num_workers": 1}, "checkpoint": {"every_steps": 2},
    }  # fmt: skip
    expanded = expand(given, None)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", expanded["data"]["date"]), "the day of submission, from then on"
    spec = JobSpec.parse(expanded)
    whole, undisturbed = run(spec, tmp_path / "whole", tmp_path / "cache")
    run(spec, tmp_path / "resumed", tmp_path / "cache", control=RequestAfter("pause", 2))
    (tmp_path / "hub" / "chat_template.jinja").write_text("another by now")
    outcome, resumed = run(spec, tmp_path / "resumed", tmp_path / "cache", attempt=2)
    assert outcome.kind == "succeeded"
    assert course(resumed) == course(undisturbed)[2:]
    exported = tmp_path / "exported"
    checkpoints = Folder(str(tmp_path / "whole" / "checkpoints"))
    save_checkpoint_as_folder(checkpoints.url_of(list_committed(checkpoints)[0]), exported, merge=True)
    card = (exported / "README.md").read_text()
    assert corpus in card
    assert str(tmp_path / "data") not in card, "where the data lies here is nobody's business"
    report = whole.report
    assert isinstance(report, LanguageReport)
    source = report.sources["conversations"]
    assert source.loss is not None
    assert len(report.completions) == 3
    assert all(each.prompt.startswith("system\n\nToday: ") for each in report.completions)
    losses = [metric["nll"] for metric in course(undisturbed)]
    if corpus == "preference":
        assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
        assert min(losses) < losses[0]
        assert source.preferred is not None
        assert source.perplexity is None
    else:
        assert source.base_loss is not None
        assert source.loss < source.base_loss
        assert source.preferred is None


CHAT = {"corpus": "chat", "paths": ["/data/*.jsonl"]}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data": {"corpus": "preference"}}, "adapter is required for the corpus preference"),
        ({"data": {"corpus": "preference"}, "adapter": {"rank": 2}, "train": {"label_smoothing": 0.1}},
         "train.label_smoothing (=0.1) does not apply to the corpus preference"),
        ({"train": {"preference_beta": 0.2}}, "train.preference_beta (=0.2) applies only to the corpus preference"),
        ({"data": {"date": "tomorrow"}}, "data.chat.date (='tomorrow') must be a date; write it as 2026-11-26"),
        ({"data": {"held_out": 0.5}}, "data.chat.held_out (=0.5)"),
        ({"data": {"paths": []}}, "data.chat.paths"),
        ({"data": {"sources": []}}, "data.chat.sources"),
    ],
)  # fmt: skip
def test_what_conversations_need_is_told_by_the_spec(changes: dict[str, dict[str, Any]], told: str, tmp_path: Path):
    given = {
        "model": {"from": str(chat_folder(tmp_path / "hub")), "moe": {"group_tokens": 512}},
        "data": CHAT, "train": {"num_steps": 4, "batch_tokens": 1024},
    }  # fmt: skip
    expanded = expand(given, None)
    for part, fields in changes.items():
        expanded[part] = {**expanded.get(part, {}), **fields}
    with pytest.raises(SpecError) as found:
        JobSpec.parse(expanded)
    assert told.replace("data.chat.", "data.") in str(found.value).replace("data.chat.", "data.")


def test_a_folder_without_a_template_is_refused_when_the_job_is_posted(tmp_path: Path):
    folder = chat_folder(tmp_path / "hub")
    (folder / "chat_template.jinja").unlink()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
    given = {
        "model": {"from": str(folder), "moe": {"group_tokens": 512}},
        "data": {**CHAT, "paths": [f"{tmp_path}/rows.jsonl"]}, "train": {"num_steps": 4, "batch_tokens": 1024},
    }  # fmt: skip
    spec = JobSpec.parse(expand(given, None))
    with refused("missing", "model.from", None):
        build_task(spec).check_data([str(tmp_path)])
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    build_task(spec).check_data([str(tmp_path)])
