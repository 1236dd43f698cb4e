"""Files of tasks: what is read, and what is refused, with the key and the line."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moe.evaluation.documents import TaskDocument
from moe.evaluation.task_file import EvaluationTask, read_tasks
from moe.evaluation.task_spec import METRICS, TaskSpec
from moe.spec import SpecError
from tests.evaluation.models import task, write_lines
from tests.refusals import refused

ROWS = [
    {"question": "Who?", "choices": ["you", "me"], "index": 1, "answer": "me", "number": 2, "word": " a "},
    {
        "question": "When?",
        "choices": ["now", "then", "0"],
        "index": 0,
        "answer": "0",
        "number": 0.5,
        "word": "B",
    },
]
FREE = {"output_type": "generate_until", "doc_to_choice": None, "doc_to_target": "answer"}
WHOLE = {
    "output_type": "loglikelihood_rolling",
    "doc_to_choice": None,
    "doc_to_text": "",
    "doc_to_target": "word",
}


def read(folder: Path, *entries: Any, rows: list[dict[str, Any]] | None = None) -> tuple[EvaluationTask, ...]:
    write_lines(folder / "data.jsonl", ROWS if rows is None else rows)
    told = entries[0] if len(entries) == 1 else list(entries)
    (folder / "tasks.yaml").write_text(yaml.safe_dump(told, allow_unicode=True))
    return read_tasks(folder / "tasks.yaml")


def test_documents_are_filled_in(tmp_path: Path) -> None:
    (found,) = read(
        tmp_path,
        task(doc_to_text="{{ number }}: {{question|upper}}", description="Say.", doc_to_choice=["{{word|trim}}", "-"],
             doc_to_target=1),
    )  # fmt: skip
    assert found.documents.test_documents == (
        TaskDocument("2: WHO?", 1, ("a", "-"), "Say."), TaskDocument("0.5: WHEN?", 1, ("B", "-"), "Say.")
    )  # fmt: skip
    assert found.documents.examples == ()
    by_text, by_index, free, whole = read(
        tmp_path,
        task(doc_to_target="answer"), task(task="b", doc_to_target="{{index}}"), task(task="c", **FREE),
        task(task="d", **WHOLE),
    )  # fmt: skip
    assert [each.target for each in by_text.documents.test_documents] == [1, 2], (
        "digits of a text are a choice"
    )
    assert [each.target for each in by_index.documents.test_documents] == [1, 0]
    assert [each.target for each in free.documents.test_documents] == ["me", "0"]
    assert [(each.text, each.target) for each in whole.documents.test_documents] == [("", " a "), ("", "B")]


def test_several_files_compressed_or_not_are_one_split(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "more").mkdir()
    write_lines(tmp_path / "more/a.jsonl", ROWS[:1])
    (tmp_path / "more/b.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROWS[1]).encode() + b"\n\n"))
    files = {"data_files": {"test": ["more/*.jsonl", "more/b.jsonl.gz"], "shots": "data.jsonl"}}
    (found,) = read(tmp_path, task(dataset_kwargs=files, num_fewshot=2, fewshot_split="shots"))
    assert [each.text for each in found.documents.test_documents] == ["Who?", "When?"]
    assert found.documents.examples == found.documents.test_documents


def test_json_is_read_too(tmp_path: Path) -> None:
    write_lines(tmp_path / "data.jsonl", ROWS)
    (tmp_path / "tasks.json").write_text(json.dumps([task()]))
    assert read_tasks(tmp_path / "tasks.json")[0].spec.task == "choices"


@pytest.mark.parametrize("output_type", METRICS)
def test_every_metric_may_be_named_as_the_harness_names_it(tmp_path: Path, output_type: str) -> None:
    over = {"multiple_choice": {}, "loglikelihood": {**FREE, "output_type": "loglikelihood"}, "generate_until": FREE,
            "loglikelihood_rolling": WHOLE}[output_type]  # fmt: skip
    metrics = [
        {"metric": name, "aggregation": aggregation, "higher_is_better": higher}
        for name, (aggregation, higher) in METRICS[output_type].items()
    ]
    (found,) = read(tmp_path, task(**over, metric_list=metrics, metadata={"version": 1.0}))
    assert [each.metric for each in found.spec.metrics] == list(METRICS[output_type])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"process_docs": "x.y"},
            r"process_docs \(='x.y'\) is no key of a task here: tasks are data, and run no code",
        ),
        ({"include": "other.yaml"}, "include .* is no key of a task here"),
        ({"filter_list": []}, "filter_list .* is no key of a task here"),
        ({"dataset_path": "org/name"}, r"dataset_path \(='org/name'\) must be 'json'"),
        (
            {"dataset_kwargs": {"data_files": {"test": "data.jsonl"}, "trust_remote_code": True}},
            r"dataset_kwargs.trust_remote_code \(=True\) is not a key",
        ),
        (
            {"dataset_kwargs": {"data_files": {"test": "/etc/passwd"}}},
            "must be a path relative to the file of tasks",
        ),
        (
            {"dataset_kwargs": {"data_files": {"test": "x/../../a.jsonl"}}},
            "must be a path relative to the file of tasks",
        ),
        (
            {"dataset_kwargs": {"data_files": {"test": "https://host/a.jsonl"}}},
            "must be a path relative to the file of",
        ),
        ({"dataset_kwargs": {"data_files": {"test": "none.jsonl"}}}, "data_files.test .* does not exist"),
        (
            {"dataset_kwargs": {"data_files": {"test": "link.jsonl"}}},
            "data_files.test .* leads out of the folders",
        ),
        ({"dataset_kwargs": {"data_files": {"test": "empty.jsonl"}}}, "data_files.test .* has no document"),
        ({"test_split": "train"}, r"test_split \(='train'\) must be one of dataset_kwargs.data_files: test"),
        ({"test_split": None}, "test_split is required; name one of data_files: test"),
        ({"num_fewshot": 1}, r"fewshot_split is required with num_fewshot \(=1\)"),
        (
            {"num_fewshot": 2, "fewshot_split": "test"},
            "num_fewshot .* must be at most the 1 other documents of the split",
        ),
        ({"output_type": "classify"}, "output_type .* must be 'loglikelihood', 'multiple_choice'"),
        ({"doc_to_choice": None}, "doc_to_choice is required with output_type: multiple_choice"),
        ({**FREE, "doc_to_target": 1}, r"doc_to_target \(=1\) must be a column or a template"),
        (
            {**FREE, "doc_to_choice": "choices"},
            "doc_to_choice .* says nothing with output_type: generate_until",
        ),
        ({"generation_kwargs": {}}, "generation_kwargs says nothing with output_type: multiple_choice"),
        ({**WHOLE, "doc_to_text": "question"}, "doc_to_text .* says nothing of whole texts"),
        (
            {"metric_list": [{"metric": "accuracy"}]},
            r"metric_list\[0\].metric .* is no metric of multiple_choice here",
        ),
        (
            {"metric_list": [{"metric": "acc", "aggregation": "median"}]},
            r"metric_list\[0\].aggregation .* must be 'mean'",
        ),
        (
            {"metric_list": [{"metric": "acc", "hf_evaluate": True}]},
            r"metric_list\[0\].hf_evaluate .* is not a key",
        ),
        ({"metric_list": [{"metric": "acc", "ignore_case": True}]}, "ignores neither case nor punctuation"),
        ({"metric_list": [{"metric": "acc"}, {"metric": "acc"}]}, "metric_list .* stands twice"),
        (
            {**FREE, "generation_kwargs": {"temperature": 1, "do_sample": False}},
            r"generation_kwargs.do_sample .* says other",
        ),
        ({**FREE, "generation_kwargs": {"until": ["x" * 300]}}, r"generation_kwargs.until"),
        (
            {**FREE, "generation_kwargs": {"max_gen_toks": 0}},
            r"generation_kwargs.max_gen_toks \(=0\) must be greater",
        ),
        ({**FREE, "generation_kwargs": {"top_k": 3}}, r"generation_kwargs.top_k \(=3\) says nothing where"),
        ({**FREE, "generation_kwargs": {"num_beams": 3}}, "generation_kwargs.num_beams .* is not a key"),
        (
            {"doc_to_text": "{{question.upper()}}"},
            r"doc_to_text \(='{{question.upper\(\)}}'\) must be text with columns in it",
        ),
        (
            {"doc_to_choice": "{{[word, answer]}}"},
            r"doc_to_choice \(='{{\[word, answer\]}}'\) must be text with columns",
        ),
        (
            {"doc_to_choice": ["{{word}}", "{% if x %}"]},
            r"doc_to_choice \(='{% if x %}'\) must be text with columns in it",
        ),
        ({"description": "{% include 'x' %}"}, "description .* must be text with columns in it"),
        ({"doc_to_target": "{{indx}}"}, r"doc_to_target \(='indx'\) is no column of the documents; name"),
        ({"doc_to_text": "qestion"}, r"doc_to_text \(='qestion'\) is no column of the documents"),
        ({"doc_to_choice": "the choices"}, r"doc_to_choice \(='the choices'\) is no column of the documents"),
        ({"doc_to_target": "number"}, r"data.jsonl, line 1'\) has the target 2 .* nor an index; use 0 to 1"),
        ({"doc_to_target": "word"}, r"data.jsonl, line 1'\) has the target ' a '"),
        (
            {"doc_to_choice": "question"},
            r"data.jsonl, line 1'\) has a string as 'question', which must be a list",
        ),
        (
            {"doc_to_choice": ["{{word}}", ""]},
            r"data.jsonl, line 1'\) has the choices .* two or more, none empty",
        ),
        (
            {"doc_to_text": "number"},
            r"has a number as 'number', which must be text; write it in quotes, or {{number}}",
        ),
        ({"doc_to_text": "{{choices}}"}, "has a list as 'choices', which must be text or a number"),
        ({"task": "a b"}, "task .* is wrong"),
    ],
)
def test_what_is_wrong_is_told_with_its_key(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to("/etc/passwd")
    entry = {key: value for key, value in task(**keys).items() if value is not None}
    with pytest.raises(SpecError, match=said) as raised:
        read(tmp_path, entry)
    assert all(
        each.path.startswith("tasks.yaml: ") and each.rule and each.remedy for each in raised.value.problems
    )
    with pytest.raises(SpecError, match=re.escape("tasks.yaml: [1].")):
        read(tmp_path, task(task="first"), entry)


@pytest.mark.parametrize(
    ("row", "code", "said"),
    [
        ({"question": "Why?"}, "missing", "has no 'choices'"),
        ({**ROWS[0], "question": "\ud800"}, "invalid_encoding", "has half a character in 'question'"),
        ({**ROWS[0], "index": True}, "wrong_type", "has the target True"),
        ({**ROWS[0], "index": 99}, "out_of_range", "has the target 99"),
        ({**ROWS[0], "index": "neither"}, "not_a_choice", "has the target 'neither'"),
        ({**ROWS[0], "choices": ["a", 1]}, "wrong_type", "has a number as 'choices', which must be text"),
    ],
)
def test_a_broken_document_is_told_with_its_line(
    tmp_path: Path, row: dict[str, Any], code: str, said: str
) -> None:
    with pytest.raises(SpecError, match=f"data.jsonl, line 3'.*{said}") as refusal:
        read(tmp_path, task(), rows=[*ROWS, row])
    assert [problem.code for problem in refusal.value.problems] == [code]


def test_lines_that_are_no_objects(tmp_path: Path) -> None:
    for line, said in (("[1]", "line 1'.* is a list, not an object"), ("{", "line 1'.* is not JSON")):
        (tmp_path / "data.jsonl").write_text(line + "\n")
        (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(task()))
        with pytest.raises(SpecError, match=said):
            read_tasks(tmp_path / "tasks.yaml")


@pytest.mark.parametrize("entries", [[], [3], "text", [task(), task()], None])
def test_what_is_no_file_of_tasks(tmp_path: Path, entries: Any) -> None:
    write_lines(tmp_path / "data.jsonl", ROWS)
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(entries))
    with pytest.raises(SpecError, match=r"tasks\.yaml"):
        read_tasks(tmp_path / "tasks.yaml")


TAGS = st.sampled_from([
    "!function", "!x", "!!python/object/apply:os.system", "!!python/name:os.system", "!!str", "!!binary", "!!map",
    "!<tag:a>", "!!python/module:os", "!include",
])  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tag=TAGS,
    key=st.sampled_from(["doc_to_text", "task", "metric_list", "process_docs"]),
    blank=st.integers(0, 3),
)
@example("!function", "doc_to_text", 0)
def test_no_tag_is_followed_and_its_line_is_told(tmp_path: Path, tag: str, key: str, blank: int) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(marker)!r}, 'w')\ndef f(doc): return 'x'\n")
    write_lines(tmp_path / "data.jsonl", ROWS)
    lines = [f"{name}: {json.dumps(value)}" for name, value in task().items() if name != key]
    lines = ["# of tasks"] * blank + [*lines, f"{key}: {tag} code.f"]
    (tmp_path / "tasks.yaml").write_text("\n".join(lines))
    with pytest.raises(SpecError, match=f"tasks.yaml, line {len(lines)}.* is a tag, and tasks are data"):
        read_tasks(tmp_path / "tasks.yaml")
    assert not marker.exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_tasks(tmp_path / "none.yaml")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(
        st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace"))
    )
)
@example(b"&a [*a]")
@example(b"task: &a x\nother: *a")
@example(b"--- 1\n--- 2")
@example(b"\xff")
def test_any_bytes_are_refused_in_words(tmp_path: Path, content: bytes) -> None:
    for name in ("tasks.yaml", "tasks.json"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SpecError):
            read_tasks(tmp_path / name)


def test_the_folder_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    read(tmp_path / "real", task())
    os.symlink(tmp_path / "real", tmp_path / "link")
    assert read_tasks(tmp_path / "link" / "tasks.yaml") == read_tasks(tmp_path / "real" / "tasks.yaml")


def test_documents_that_say_the_same_are_no_examples_of_each_other(tmp_path: Path) -> None:
    shots = {"num_fewshot": 1, "fewshot_split": "test"}
    read(tmp_path, task(**shots), rows=[*ROWS, ROWS[0]])
    with refused("out_of_range", "tasks.yaml: num_fewshot", 1):
        read(tmp_path, task(**shots), rows=[ROWS[0]] * 3)


def test_the_documented_task_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs/language-models.md").read_text()
    block = re.search(r"^## Judging\n.*?^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    assert TaskSpec(**yaml.safe_load(block[1])).num_fewshot == 1
