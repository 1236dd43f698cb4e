"""A base model tuned on conversations stops at the token that closes its answers, here and in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.export.hub import save_checkpoint_as_folder
from moe.export.trained_model import TrainedModel
from moe.interchange.expand import expand
from moe.spec import JobSpec, SpecError
from moe.spec.generation import GenerationSpec
from moe.storage.folder import Folder
from moe.tasks.build import build_task
from moe.train.checkpoint.marker import list_committed
from tests.interchange import tiny
from tests.unit import chats
from tests.unit.published_templates import read_template
from tests.unit.streaming import collect_stream
from tests.unit.train_runs import RequestAfter, course, run

END_OF_TEXT, END_OF_TURN = 1, 4
ROW = {"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "the Sun"}]}


def base_folder(folder: Path, template: str | None) -> Path:
    """A base model whose configs name the end of a document, and whose template ends turns by another token."""
    tiny.folder_of(tiny.their_model("qwen3", vocab_size=480), folder, dtype=torch.float32)
    files = chats.tokenizer_files(template or "")
    if template is None:
        del files["chat_template.jinja"]
    for name, content in files.items():
        (folder / name).write_bytes(content)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": END_OF_TEXT}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_OF_TEXT, "top_k": 20}))
    return folder


def job(folder: Path, rows: list[dict[str, Any]], data: Path, **fields: Any) -> dict[str, Any]:
    data.mkdir(exist_ok=True)
    (data / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"from": str(folder)},
        "data": {"corpus": "chat", "paths": [f"{data}/*.jsonl"], "max_tokens": 64, "held_out": 0, **fields},
        "train": {"num_steps": 60, "batch_tokens": 256, "optimizer": {"name": "adamw", "peak_lr": 1e-2},
                  "schedule": {"warmup_steps": 1, "decay": "constant"}},
        "resources": {"num_workers": 1}, "checkpoint": {"every_steps": 60},
    }  # fmt: skip


def newest(storage: Path) -> str:
    checkpoints = Folder(str(storage / "checkpoints"))
    return checkpoints.url_of(list_committed(checkpoints)[0])


@pytest.mark.slow
def test_a_tuned_base_stops_at_what_closed_its_answers(tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = base_folder(tmp_path / "hub", read_template("qwen3"))
    spec = JobSpec.parse(expand(job(folder, [ROW] * 16, tmp_path / "data"), None))
    assert build_task(spec).check_data([str(tmp_path)]) == (), "the template closes answers"
    _, events = run(spec, tmp_path / "run", tmp_path / "cache")
    assert course(events)[-1]["nll"] < 0.05
    checkpoint = newest(tmp_path / "run")
    generator = TrainedModel.load(checkpoint).generator
    spec_of_answer = GenerationSpec(max_tokens=40, chat=True)
    pieces, ending = collect_stream(generator, "who?", spec_of_answer)
    assert ending.reason == "end"
    assert "".join(pieces).strip().endswith("the Sun")
    save_checkpoint_as_folder(checkpoint, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert config == {"eos_token_id": [END_OF_TEXT, END_OF_TURN], "top_k": 20}
    model, tokenizer = (loader.from_pretrained(tmp_path / "out") for loader in (AutoModelForCausalLM, AutoTokenizer))
    inputs = tokenizer.apply_chat_template(
        ROW["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output_ids = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert int(output_ids[-1]) == END_OF_TURN
    assert len(output_ids) < 40


@pytest.mark.slow
def test_an_exported_adapter_says_what_closes_its_answers(tmp_path: Path):
    folder = base_folder(tmp_path / "hub", read_template("qwen3"))
    values = {**job(folder, [ROW] * 16, tmp_path / "data"), "adapter": {"rank": 2}, "checkpoint": {"every_steps": 1}}
    values["train"]["num_steps"] = 1
    run(JobSpec.parse(expand(values, None)), tmp_path / "run", tmp_path / "cache")
    save_checkpoint_as_folder(newest(tmp_path / "run"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert config["eos_token_id"] == [END_OF_TEXT, END_OF_TURN]
    assert (tmp_path / "out" / "adapter_config.json").exists()


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ mood | default('') }}{% endif %}"
)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("has_own", [True, False])
def test_a_template_for_training_is_used_and_does_not_replace_the_folder_s(has_own: bool, tmp_path: Path):
    own_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}" if has_own else None
    folder = base_folder(tmp_path / "hub", own_template)
    template_file = tmp_path / "given.jinja"
    template_file.write_text(TEMPLATE)
    fields = {"chat_template": str(template_file), "template_arguments": {"mood": "!"}}
    values = job(folder, [ROW] * 16, tmp_path / "data", **fields)
    values["train"]["num_steps"] = 4
    values["checkpoint"]["every_steps"] = 2
    spec = JobSpec.parse(expand(values, None))
    build_task(spec).check_data([str(tmp_path)])
    _, full_run = run(spec, tmp_path / "run", tmp_path / "cache")
    run(spec, tmp_path / "resumed", tmp_path / "cache", control=RequestAfter("pause", 2))
    template_file.write_text("another by now")
    _, resumed_run = run(spec, tmp_path / "resumed", tmp_path / "cache", attempt=2)
    assert course(resumed_run) == course(full_run)[2:]
    checkpoint = newest(tmp_path / "run")
    template = TrainedModel.load(checkpoint).generator.chat_template()  # type: ignore[attr-defined]
    assert template.render_prompt("who?") == "[user]who?[assistant]!"
    for is_asked, name in ((False, "plain"), (True, "asked")):
        save_checkpoint_as_folder(checkpoint, tmp_path / name, chat_template=is_asked)
        exported_template = (tmp_path / name / "chat_template.jinja").read_text()
        assert exported_template == (TEMPLATE if is_asked or not has_own else own_template)
        assert str(tmp_path) not in (tmp_path / name / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "rule"), [("*", "names 2 files"), ("a", "is not a valid template"), ("c", "does not exist")]
)
def test_a_wrong_template_file_is_refused(name: str, rule: str, tmp_path: Path):
    folder = base_folder(tmp_path / "hub", read_template("qwen3"))
    for file in ("a.jinja", "b.jinja"):
        (tmp_path / file).write_text("{% if %}")
    template = f"{tmp_path}/{name}.jinja"
    spec = JobSpec.parse(expand(job(folder, [ROW], tmp_path / "data", chat_template=template), None))
    with pytest.raises(SpecError, match=rf"data\.chat_template.*{rule}"):
        build_task(spec).check_data([str(tmp_path)])


def test_a_corpus_whose_answers_end_in_nothing_is_warned_of(tmp_path: Path):
    folder = base_folder(tmp_path / "hub", "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    spec = JobSpec.parse(expand(job(folder, [ROW], tmp_path / "data"), None))
    (warning,) = build_task(spec).check_data([str(tmp_path)])
    assert warning.startswith("no learned text ends in a token that ends generation")


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"messages": []}, "must not set 'messages', which comes from the conversations"),
        ({"a b": 1}, "a b"),
        ({"a": ["\ud800"]}, "lone surrogates"),
        ({"a": "x" * 10_001}, "at most 10,000 characters"),
    ],
)
def test_impossible_arguments_of_a_template_are_refused(arguments: dict[str, Any], rule: str, tmp_path: Path):
    folder = base_folder(tmp_path / "hub", read_template("qwen3"))
    with pytest.raises(SpecError, match=rule):
        JobSpec.parse(expand(job(folder, [ROW], tmp_path / "data", template_arguments=arguments), None))
