"""Documents of an evaluation task, rendered from its data files."""

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from moe.data.data_file import DataFile
from moe.data.json_lines import kind_of, parse_object
from moe.data.lines import Lines
from moe.data.locations import Locator
from moe.evaluation.task_spec import TaskSpec
from moe.evaluation.template import Template
from moe.spec.errors import Problem, ProblemCode, SpecError, spec_error

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLACE = "dataset_kwargs.data_files"


@dataclass(frozen=True)
class TaskDocument:
    """Document of a task, as texts for the model."""

    text: str
    """Context."""
    target: str | int
    """Target text, or the index of the correct choice."""
    choices: tuple[str, ...]
    description: str


@dataclass(frozen=True)
class TaskDocuments:
    """Documents of a task."""

    test_documents: tuple[TaskDocument, ...]
    examples: tuple[TaskDocument, ...]
    """Pool of few-shot examples; empty if the task has none."""


def read_documents(task: TaskSpec, folder: Path) -> TaskDocuments:
    """Read the documents of a task with data files in `folder` or below.

    Raises SpecError with file and line.
    """
    documents = _split(task, task.split, folder)
    examples = tuple[TaskDocument, ...]()
    if task.num_fewshot and task.fewshot_split is not None:
        is_same = task.fewshot_split == task.split
        examples = documents if is_same else _split(task, task.fewshot_split, folder)
    # A document is never an example for itself or for an equal one.
    num_equal = max(Counter(documents).values()) if task.fewshot_split == task.split else 0
    if task.num_fewshot > (num_others := len(examples) - num_equal):
        rule = f"must be at most the {num_others:,} other documents of the split {task.fewshot_split}"
        raise spec_error("out_of_range", "num_fewshot", task.num_fewshot, rule, "lower it, or add documents")
    return TaskDocuments(documents, examples)


@dataclass(frozen=True)
class _Line:
    """Document as a line of a data file."""

    lines: Lines
    number: int
    values: Mapping[str, object]

    def error(self, code: ProblemCode, rule: str, remedy: str) -> SpecError:
        return self.lines.broken(code, self.number, rule, remedy)

    def text_of(self, column: str, value: object) -> str:
        if not isinstance(value, str):
            remedy = f"write it in quotes, or {{{{{column}}}}} in the task"
            raise self.error("wrong_type", f"has {kind_of(value)} as {column!r}, which must be text", remedy)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.error(
                "invalid_encoding", f"has half of a surrogate pair in {column!r}", "remove the lone surrogate"
            ) from None
        return value

    def value_of(self, column: str) -> object:
        if column not in self.values:
            raise self.error("missing", f"has no {column!r}", "give every document the same columns")
        return self.values[column]

    def render(self, template: Template) -> str:
        values = dict[str, str | int | float]()
        for column in template.columns:
            value = self.value_of(column)
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                rule = f"has {kind_of(value)} as {column!r}, which must be text or a number"
                raise self.error("wrong_type", rule, "write it as one")
            values[column] = self.text_of(column, value) if isinstance(value, str) else value
        return template.render(values)


def _split(task: TaskSpec, split: str, folder: Path) -> tuple[TaskDocument, ...]:
    document_lines = list[_Line]()
    for path in task.dataset_kwargs.paths(split):
        place = f"{_PLACE}.{split}"
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "://" in path:
            rule = "must be a path below the task file's folder"
            raise spec_error("not_allowed", place, path, rule, "put the file next to the task file")
        for location in Locator([str(folder)]).locate(place, f"{folder}/{path}"):
            lines = Lines(DataFile(place, location), remedy="shorten it")
            document_lines += [
                _Line(lines, number, parse_object(lines, number, line)) for number, line in lines if line.strip()
            ]
    if not document_lines:
        paths = ", ".join(task.dataset_kwargs.paths(split))
        raise spec_error("empty", f"{_PLACE}.{split}", paths, "has no documents", "write one JSON object per line")
    columns = dict.fromkeys(column for line in document_lines for column in line.values)
    _check_columns(task, tuple(columns))
    return tuple(_document(task, line, columns.keys()) for line in document_lines)


def _check_columns(task: TaskSpec, columns: Sequence[str]) -> None:
    """Raise SpecError for unknown column names: the harness would show the name itself to the model."""
    remedy = f"name one of {', '.join(map(repr, columns[:20]))}, or write a template with one: {{{{column}}}}"
    problems = []
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice", "description"):
        source = getattr(task, key)
        if not isinstance(source, str) or source in columns:
            continue
        template = Template.parse(source)
        problems += [
            Problem("not_found", key, name, "is not a column of the documents", remedy)
            for name in template.columns
            if name not in columns
        ]
        is_index = key == "doc_to_target" and task.doc_to_choice is not None and source.isdecimal()
        is_unknown_column = not template.columns and not is_index and (
            key in ("doc_to_target", "doc_to_choice") or (key == "doc_to_text" and _WORD.fullmatch(source))
        )  # fmt: skip
        if is_unknown_column:
            problems.append(Problem("not_found", key, source, "is not a column of the documents", remedy))
    if problems:
        raise SpecError(problems)


def _document(task: TaskSpec, line: _Line, columns: Container[str]) -> TaskDocument:
    choices = _choices(task, line, columns)
    target: str | int
    if choices:
        target = _index(task, line, columns, choices)
    else:
        assert isinstance(task.doc_to_target, str)
        target = _text(task.doc_to_target, line, columns)
        if not target and task.output_type != "generate_until":
            raise line.error("empty", "has an empty target (doc_to_target)", "add text")
    return TaskDocument(_text(task.doc_to_text, line, columns), target, choices, _text(task.description, line, columns))


def _text(source: str, line: _Line, columns: Container[str]) -> str:
    """Text from a column or a template."""
    if source in columns:
        return line.text_of(source, line.value_of(source))
    return line.render(Template.parse(source))


def _choices(task: TaskSpec, line: _Line, columns: Container[str]) -> tuple[str, ...]:
    source = task.doc_to_choice
    if source is None:
        return ()
    if isinstance(source, str):
        value = line.value_of(source)
        if not isinstance(value, list):
            rule = f"has {kind_of(value)} as {source!r}, which must be a list of choices"
            raise line.error("wrong_type", rule, "write a list of texts")
        choices = tuple(line.text_of(source, choice) for choice in value)
    else:
        choices = tuple(line.render(Template.parse(choice_template)) for choice_template in source)
    if len(choices) < 2 or not all(choices):
        raise line.error("invalid_value", f"has the choices {list(choices)!r}; it must have at least two, none empty",
                           "add the missing text")  # fmt: skip
    return choices


def _index(task: TaskSpec, line: _Line, columns: Container[str], choices: Sequence[str]) -> int:
    """Index of the correct choice, from an index or the choice's text.

    As in the harness, digits are an index if rendered by a template, but a choice's text if from a text column.
    """
    source = task.doc_to_target
    value: object = source
    if isinstance(source, str) and source in columns:
        value = line.value_of(source)
    elif isinstance(source, str):
        text = line.render(Template.parse(source))
        value = int(text) if text.isdecimal() else text
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(choices):
        return value
    if isinstance(value, str) and value in choices:
        return choices.index(value)
    rule = f"has the target {value!r} (doc_to_target), which is neither one of its {len(choices)} choices nor an index"
    code: ProblemCode = "out_of_range" if type(value) is int else "wrong_type"
    code = "not_a_choice" if isinstance(value, str) else code
    raise line.error(code, rule, f"use 0 to {len(choices) - 1}, or the choice's text")
