"""Task files: what is accepted, and what is refused, with key and line."""

import gzip
import json
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
from moe.spec import ProblemCode, SpecError
from tests.evaluation.models import task, write_lines
from tests.refusals import expect_problem

ROWS = [
    {"question": "Who?", "choices": ["you", "me"], "index": 1, "answer": "me", "number": 2, "word": " a "},
    {"question": "When?", "choices": ["now", "then", "0"], "index": 0, "answer": "0", "number": 0.5, "word": "B"},
]
FREE = {"output_type": "generate_until", "doc_to_choice": None, "doc_to_target": "answer"}
WHOLE = {"output_type": "loglikelihood_rolling", "doc_to_choice": None, "doc_to_text": "", "doc_to_target": "word"}


def read(folder: Path, *entries: Any, rows: list[dict[str, Any]] | None = None) -> tuple[EvaluationTask, ...]:
    write_lines(folder / "data.jsonl", ROWS if rows is None else rows)
    content = entries[0] if len(entries) == 1 else list(entries)
    (folder / "tasks.yaml").write_text(yaml.safe_dump(content, allow_unicode=True))
    return read_tasks(folder / "tasks.yaml")


def test_templates_of_documents_are_rendered(tmp_path: Path) -> None:
    entry = task(doc_to_text="{{ number }}: {{question|upper}}", description="Say.",
                    doc_to_choice=["{{word|trim}}", "-"], doc_to_target=1)  # fmt: skip
    (evaluation_task,) = read(tmp_path, entry)
    assert evaluation_task.documents.test_documents == (
        TaskDocument("2: WHO?", 1, ("a", "-"), "Say."), TaskDocument("0.5: WHEN?", 1, ("B", "-"), "Say.")
    )  # fmt: skip
    assert evaluation_task.documents.examples == ()


@pytest.mark.parametrize(
    ("keys", "texts_and_targets"),
    [
        ({"doc_to_target": "answer"}, [("Who?", 1), ("When?", 2)]),  # digits in a text select a choice
        ({"doc_to_target": "{{index}}"}, [("Who?", 1), ("When?", 0)]),
        (FREE, [("Who?", "me"), ("When?", "0")]),
        (WHOLE, [("", " a "), ("", "B")]),
    ],
)
def test_targets_are_choices_or_texts(tmp_path: Path, keys: dict[str, Any], texts_and_targets: list) -> None:
    (evaluation_task,) = read(tmp_path, task(**keys))
    assert [
        (document.text, document.target) for document in evaluation_task.documents.test_documents
    ] == texts_and_targets


def test_several_files_compressed_or_not_are_one_split(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    write_lines(tmp_path / "more/a.jsonl", ROWS[:1])
    (tmp_path / "more/b.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROWS[1]).encode() + b"\n\n"))
    files = {"data_files": {"test": ["more/*.jsonl", "more/b.jsonl.gz"], "shots": "data.jsonl"}}
    (evaluation_task,) = read(tmp_path, task(dataset_kwargs=files, num_fewshot=2, fewshot_split="shots"))
    assert [document.text for document in evaluation_task.documents.test_documents] == ["Who?", "When?"]
    assert evaluation_task.documents.examples == evaluation_task.documents.test_documents


@pytest.mark.parametrize("output_type", METRICS)
def test_every_metric_may_be_named_as_the_harness_names_it(tmp_path: Path, output_type: str) -> None:
    over = {"multiple_choice": {}, "loglikelihood": {**FREE, "output_type": "loglikelihood"}, "generate_until": FREE,
            "loglikelihood_rolling": WHOLE}[output_type]  # fmt: skip
    metrics = [
        {"metric": name, "aggregation": aggregation, "higher_is_better": higher}
        for name, (aggregation, higher) in METRICS[output_type].items()
    ]
    (evaluation_task,) = read(tmp_path, task(**over, metric_list=metrics, metadata={"version": 1.0}))
    assert [metric.metric for metric in evaluation_task.spec.metrics] == list(METRICS[output_type])


def file_of_test(name: str) -> dict[str, Any]:
    return {"dataset_kwargs": {"data_files": {"test": name}}}


FILE = "dataset_kwargs.data_files.test"
WRONG: list[tuple[dict[str, Any], ProblemCode, str]] = [
    ({"process_docs": "x.y"}, "unknown_key", "process_docs"),
    ({"include": "other.yaml"}, "unknown_key", "include"),
    ({"filter_list": []}, "unknown_key", "filter_list"),
    ({"dataset_path": "org/name"}, "not_a_choice", "dataset_path"),
    ({"dataset_kwargs": {"data_files": {"test": "data.jsonl"}, "trust_remote_code": True}}, "unknown_key",
     "dataset_kwargs.trust_remote_code"),
    (file_of_test("/etc/passwd"), "not_allowed", FILE),
    (file_of_test("x/../../a.jsonl"), "not_allowed", FILE),
    (file_of_test("https://host/a.jsonl"), "not_allowed", FILE),
    (file_of_test("none.jsonl"), "not_found", FILE),
    (file_of_test("link.jsonl"), "not_allowed", FILE),
    (file_of_test("empty.jsonl"), "empty", FILE),
    ({"test_split": "train"}, "not_a_choice", "test_split"),
    ({"test_split": None}, "missing", "test_split"),
    ({"num_fewshot": 1}, "missing", "fewshot_split"),
    ({"num_fewshot": 2, "fewshot_split": "test"}, "out_of_range", "num_fewshot"),
    ({"output_type": "classify"}, "not_a_choice", "output_type"),
    ({"doc_to_choice": None}, "missing", "doc_to_choice"),
    ({**FREE, "doc_to_target": 1}, "wrong_type", "doc_to_target"),
    ({**FREE, "doc_to_choice": "choices"}, "not_applicable", "doc_to_choice"),
    ({"generation_kwargs": {}}, "not_applicable", "generation_kwargs"),
    ({**WHOLE, "doc_to_text": "question"}, "not_applicable", "doc_to_text"),
    ({"metric_list": [{"metric": "accuracy"}]}, "not_a_choice", "metric_list[0].metric"),
    ({"metric_list": [{"metric": "acc", "aggregation": "median"}]}, "unsupported", "metric_list[0].aggregation"),
    ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "unknown_key", "metric_list[0].hf_evaluate"),
    ({"metric_list": [{"metric": "acc", "ignore_case": True}]}, "unsupported", "metric_list[0]"),
    ({"metric_list": [{"metric": "acc"}, {"metric": "acc"}]}, "duplicate", "metric_list"),
    ({**FREE, "generation_kwargs": {"temperature": 1, "do_sample": False}}, "conflict",
     "generation_kwargs.do_sample"),
    ({**FREE, "generation_kwargs": {"until": ["x" * 300]}}, "too_large", "generation_kwargs.until[0]"),
    ({**FREE, "generation_kwargs": {"max_gen_toks": 0}}, "out_of_range", "generation_kwargs.max_gen_toks"),
    ({**FREE, "generation_kwargs": {"top_k": 3}}, "not_applicable", "generation_kwargs.top_k"),
    ({**FREE, "generation_kwargs": {"num_beams": 3}}, "unknown_key", "generation_kwargs.num_beams"),
    ({"doc_to_text": "{{question.upper()}}"}, "invalid_syntax", "doc_to_text"),
    ({"doc_to_choice": "{{[word, answer]}}"}, "invalid_syntax", "doc_to_choice"),
    ({"doc_to_choice": ["{{word}}", "{% if x %}"]}, "invalid_syntax", "doc_to_choice"),
    ({"description": "{% include 'x' %}"}, "invalid_syntax", "description"),
    ({"doc_to_target": "{{indx}}"}, "not_found", "doc_to_target"),
    ({"doc_to_text": "qestion"}, "not_found", "doc_to_text"),
    ({"doc_to_choice": "the choices"}, "not_found", "doc_to_choice"),
    ({"doc_to_target": "number"}, "out_of_range", FILE),
    ({"doc_to_target": "word"}, "not_a_choice", FILE),
    ({"doc_to_choice": "question"}, "wrong_type", FILE),
    ({"doc_to_choice": ["{{word}}", ""]}, "invalid_value", FILE),
    ({"doc_to_text": "number"}, "wrong_type", FILE),
    ({"doc_to_text": "{{choices}}"}, "wrong_type", FILE),
    ({"task": "a b"}, "invalid_value", "task"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "code", "path"), WRONG)
def test_what_is_wrong_is_told_with_its_key(tmp_path: Path, keys: dict[str, Any], code: ProblemCode, path: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to("/etc/passwd")
    entry = {key: value for key, value in task(**keys).items() if value is not None}
    with expect_problem(code, f"tasks.yaml: {path}") as error:
        read(tmp_path, entry)
    assert all(problem.rule and problem.remedy for problem in error.value.problems)
    with expect_problem(code, f"tasks.yaml: [1].{path}"):
        read(tmp_path, task(task="first"), entry)


@pytest.mark.parametrize(
    ("row", "code", "message"),
    [
        ({"question": "Why?"}, "missing", "has no 'choices'"),
        ({**ROWS[0], "question": "\ud800"}, "invalid_encoding", "has half of a surrogate pair in 'question'"),
        ({**ROWS[0], "index": True}, "wrong_type", "has the target True"),
        ({**ROWS[0], "index": 99}, "out_of_range", "has the target 99"),
        ({**ROWS[0], "index": "neither"}, "not_a_choice", "has the target 'neither'"),
        ({**ROWS[0], "choices": ["a", 1]}, "wrong_type", "has a number as 'choices', which must be text"),
    ],
)
def test_a_broken_document_is_reported_with_its_line(
    tmp_path: Path, row: dict[str, Any], code: str, message: str
) -> None:
    with pytest.raises(SpecError, match=f"data.jsonl, line 3'.*{message}") as refusal:
        read(tmp_path, task(), rows=[*ROWS, row])
    assert [problem.code for problem in refusal.value.problems] == [code]


@pytest.mark.parametrize(
    ("line", "message"), [("[1]", "line 1'.* is a list, not an object"), ("{", "line 1'.* is not JSON")]
)
def test_lines_that_are_no_objects_are_refused(tmp_path: Path, line: str, message: str) -> None:
    read(tmp_path, task())
    (tmp_path / "data.jsonl").write_text(line + "\n")
    with pytest.raises(SpecError, match=message):
        read_tasks(tmp_path / "tasks.yaml")


@pytest.mark.parametrize("entries", [[], [3], "text", [task(), task()], None])
def test_a_file_without_tasks_is_refused(tmp_path: Path, entries: Any) -> None:
    with pytest.raises(SpecError, match=r"tasks\.yaml"):
        read(tmp_path, entries)


TAGS = st.sampled_from([
    "!function", "!x", "!!python/object/apply:os.system", "!!python/name:os.system", "!!str", "!!binary", "!!map",
    "!<tag:a>", "!!python/module:os", "!include",
])  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tag=TAGS, key=st.sampled_from(["doc_to_text", "task", "metric_list", "process_docs"]), blank=st.integers(0, 3))
@example("!function", "doc_to_text", 0)
def test_no_tag_is_followed_and_its_line_is_told(tmp_path: Path, tag: str, key: str, blank: int) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(marker)!r}, 'w')\ndef f(doc): return 'x'\n")
    write_lines(tmp_path / "data.jsonl", ROWS)
    lines = [f"{name}: {json.dumps(value)}" for name, value in task().items() if name != key]
    lines = ["# of tasks"] * blank + [*lines, f"{key}: {tag} code.f"]
    (tmp_path / "tasks.yaml").write_text("\n".join(lines))
    with pytest.raises(SpecError, match=f"tasks.yaml, line {len(lines)}.* is a tag, which tasks may not have"):
        read_tasks(tmp_path / "tasks.yaml")
    assert not marker.exists()


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
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


def test_files_are_json_or_yaml_and_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (from_yaml,) = read(tmp_path / "real", task())
    (tmp_path / "real" / "tasks.json").write_text(json.dumps([task()]))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for path in ("link/tasks.yaml", "real/tasks.json"):
        assert read_tasks(tmp_path / path) == (from_yaml,)
    with pytest.raises(FileNotFoundError):
        read_tasks(tmp_path / "none.yaml")


def test_documents_that_say_the_same_are_no_examples_of_each_other(tmp_path: Path) -> None:
    shots = {"num_fewshot": 1, "fewshot_split": "test"}
    read(tmp_path, task(**shots), rows=[*ROWS, ROWS[0]])
    with expect_problem("out_of_range", "tasks.yaml: num_fewshot", 1):
        read(tmp_path, task(**shots), rows=[ROWS[0]] * 3)


def test_the_documented_task_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs/language-models.md").read_text()
    block = re.search(r"^## Evaluation\n.*?^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert TaskSpec(**yaml.safe_load(block[1])).num_fewshot == 1
