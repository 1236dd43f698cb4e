"""Jobs on conversations and preferences that start from a folder with a chat template."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.export.hub import save_checkpoint_as_folder
from moe.export.load import load_trained
from moe.interchange.expand import expand
from moe.spec import JobSpec
from moe.spec.generation import GenerationSpec
from moe.tasks.build import build_task
from tests.interchange import tiny
from tests.interchange.test_jobs import stored_in
from tests.refusals import expect_problem
from tests.unit import chats
from tests.unit.train_runs import RequestAfter, course, run


def chat_folder(folder: Path) -> Path:
    """A mixtral with a tokenizer of special tokens, and a chat template."""
    tiny.folder_of(tiny.their_model("mixtral", vocab_size=480), folder, dtype=torch.float32)
    for name, content in chats.tokenizer_files(chats.STRUCTURES["llama"].source).items():
        (folder / name).write_bytes(content)
    return folder


def chat_job(folder: Path, **parts: dict[str, Any]) -> dict[str, Any]:
    """A job on conversations; `parts` adds fields to its parts."""
    job: dict[str, Any] = {
        "name": "tuned", "model": {"from": str(chat_folder(folder)), "moe": {"group_tokens": 512}},
        "data": {"corpus": "chat", "paths": ["/data/*.jsonl"]}, "train": {"num_steps": 4, "batch_tokens": 1024},
        "resources": {"num_workers": 1}, "checkpoint": {"every_steps": 2},
    }  # fmt: skip
    return expand({**job, **{part: {**job.get(part, {}), **fields} for part, fields in parts.items()}}, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("corpus", "rank"),
    [("preference", None), ("chat", 2), ("preference", 2), ("unpaired_preference", None), ("unpaired_preference", 2)],
)
def test_conversations_are_learned_paused_and_gone_on_with(corpus: str, rank: int | None, tmp_path: Path):
    rng = random.Random(corpus)
    (tmp_path / "data").mkdir()
    rows = [chats.conversation(rng, chats.STRUCTURES["llama"]) for _ in range(80)]
    if corpus == "preference":
        rows = [{"prompt": row["messages"][:-1], "chosen": row["messages"][-1:],
                 "rejected": [{"role": "assistant", "content": "no"}]} for row in rows]  # fmt: skip
    if corpus == "unpaired_preference":
        rows = [{"messages": row["messages"], "label": number % 3 > 0} for number, row in enumerate(rows)]
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"corpus": corpus, "paths": [f"{tmp_path}/data/*"], "max_tokens": 512, "held_out": 0.2}
    optimizer = {"name": "adamw", "peak_lr": 2e-2}
    adapter = {} if rank is None else {"adapter": {"rank": rank}}
    loss = {"preference_loss": "kto", "undesirable_weight": 2.0} if corpus == "unpaired_preference" else {}
    expanded_job = chat_job(tmp_path / "hub", data=data, **adapter, train={
        **loss, "optimizer": optimizer, "evaluation": {"every_steps": 4, "prompts": ["Why?"], "prompt_max_tokens": 6},
    })  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", expanded_job["data"]["date"]), "the day of submission, from then on"
    spec = JobSpec.parse(expanded_job)
    full_outcome, full_run = run(spec, tmp_path / "whole", tmp_path / "cache")
    run(spec, tmp_path / "resumed", tmp_path / "cache", control=RequestAfter("pause", 2))
    (tmp_path / "hub" / "chat_template.jinja").write_text("another by now")
    outcome, resumed_run = run(spec, tmp_path / "resumed", tmp_path / "cache", attempt=2)
    assert outcome.kind == "succeeded"
    assert course(resumed_run) == course(full_run)[2:]
    save_checkpoint_as_folder(str(stored_in(tmp_path / "whole", 4)), tmp_path / "exported", merge=rank is not None)
    card = (tmp_path / "exported" / "README.md").read_text()
    assert corpus in card
    assert str(tmp_path / "data") not in card, "where the data lies here is nobody's business"
    (sample,) = full_run.metrics[-1].samples or ()
    as_chat = GenerationSpec(max_tokens=6, chat=True)
    assert [sample.completion] == load_trained(str(stored_in(tmp_path / "whole", 4))).generate(["Why?"], as_chat)
    report = full_outcome.report
    source = report.sources["conversations"]
    assert source.loss is not None
    assert len(report.completions) == 3
    assert all(completion.prompt.startswith("system\n\nToday: ") for completion in report.completions)
    if rank is None:
        tiny.folder_of(tiny.their_model("mixtral", vocab_size=480, seed=1), tmp_path / "hub", dtype=torch.float32)
        with expect_problem("mismatch", "model.from", str(tmp_path / "hub")):
            run(spec, tmp_path / "resumed", tmp_path / "cache", attempt=3)
    losses = [metric["nll"] for metric in course(full_run)]
    if corpus == "preference":
        assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
        assert min(losses) < losses[0]
        assert source.preferred is not None
        assert source.perplexity is None
    elif corpus == "unpaired_preference":
        numbers = [metric["numbers"] for metric in course(full_run)]
        assert numbers[0]["kl"] == pytest.approx(0, abs=1e-4)
        assert numbers[0]["reward_desirable"] == pytest.approx(0, abs=1e-4)
        rewards = [{name: number[f"reward_{name}"] for name in ("desirable", "undesirable")} for number in numbers]
        for number, reward in zip(numbers, rewards, strict=True):
            has_both = None not in reward.values()
            assert number.get("reward_margin") == (reward["desirable"] - reward["undesirable"] if has_both else None)
        assert any("reward_margin" in number for number in numbers)
        assert 0.5 - 1e-4 <= losses[0] <= 1.0 + 1e-4, "half of each weight"
        assert losses[3] != losses[0]
        assert source.kl is not None
        assert source.reward_margin is not None
        assert source.preferred is source.perplexity is None
    else:
        assert source.base_loss is not None
        assert source.loss < source.base_loss
        assert source.preferred is None


UNPAIRED = {"data": {"corpus": "unpaired_preference"}}


@pytest.mark.parametrize(
    ("changes", "code", "path"),
    [
        ({"train": {"preference_loss": "ipo"}}, "not_applicable", "train.preference_loss"),
        ({"data": {"corpus": "preference"}, "train": {"preference_loss": "orpo", "preference_margin": 1.0}},
         "not_applicable", "train.preference_margin"),
        ({"data": {"corpus": "preference"}, "adapter": {"rank": 2}, "train": {"label_smoothing": 0.1}},
         "not_applicable", "train.label_smoothing"),
        ({"train": {"preference_beta": 0.2}}, "not_applicable", "train.preference_beta"),
        ({"data": {"corpus": "unpaired_preference"}}, "not_applicable", "train.preference_loss"),
        ({"data": {"corpus": "preference"}, "train": {"preference_loss": "kto"}}, "not_applicable",
         "train.preference_loss"),
        ({"data": {"corpus": "preference"}, "train": {"undesirable_weight": 2.0}}, "not_applicable",
         "train.undesirable_weight"),
        ({"train": {"desirable_weight": 2.0}}, "not_applicable", "train.desirable_weight"),
        ({**UNPAIRED, "train": {"preference_loss": "kto", "desirable_weight": 0, "undesirable_weight": 0}},
         "out_of_range", "train.desirable_weight"),
        ({**UNPAIRED, "train": {"preference_loss": "kto", "batch_tokens": 512}}, "out_of_range", "train.batch_tokens"),
        ({**UNPAIRED, "train": {"preference_loss": "kto", "preference_margin": 1.0}}, "not_applicable",
         "train.preference_margin"),
        ({**UNPAIRED, "train": {"preference_loss": "kto", "cuda_graphs": True}}, "not_applicable",
         "train.cuda_graphs"),
        ({"data": {"date": "tomorrow"}}, "invalid_value", "data.date"),
        ({"data": {"held_out": 0.5}}, "out_of_range", "data.held_out"),
        ({"data": {"paths": []}}, "empty", "data.paths"),
        ({"data": {"sources": []}}, "empty", "data.sources"),
    ],
)  # fmt: skip
def test_wrong_specs_of_conversations_are_refused(changes, code, path, tmp_path):
    expanded_job = chat_job(tmp_path / "hub")
    for part, fields in changes.items():
        expanded_job[part] = {**expanded_job.get(part, {}), **fields}
    with expect_problem(code, path):
        JobSpec.parse(expanded_job)


def test_a_folder_without_a_template_is_refused_when_the_job_is_posted(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
    spec = JobSpec.parse(chat_job(tmp_path / "hub", data={"paths": [f"{tmp_path}/rows.jsonl"]}))
    template = tmp_path / "hub" / "chat_template.jinja"
    template.unlink()
    with expect_problem("missing", "model.from", None):
        build_task(spec).check_data([str(tmp_path)])
    template.write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    build_task(spec).check_data([str(tmp_path)])
