"""Task files: YAML or JSON with one evaluation task or a list of them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from moe.evaluation.documents import TaskDocuments, read_documents
from moe.evaluation.task_spec import TaskSpec
from moe.spec.errors import Problem, SpecError, spec_error
from moe.spec.files import MAX_DEPTH, MAX_SPEC_BYTES, read_plain

_MAX_TASKS = 1000


@dataclass(frozen=True)
class EvaluationTask:
    """Task with its documents."""

    spec: TaskSpec
    documents: TaskDocuments


def read_tasks(path: str | Path) -> tuple[EvaluationTask, ...]:
    """Read the tasks of a file, with data files in its folder or below.

    Raises SpecError for invalid tasks, OSError if the file cannot be read.
    """
    path = Path(path)
    _refuse_tags(path)
    content = read_plain(path)
    entries = content if isinstance(content, list) else [content]
    if not 0 < len(entries) <= _MAX_TASKS:
        rule = f"must have 1 to {_MAX_TASKS:,} tasks"
        raise spec_error("out_of_range", path.name, len(entries), rule, "write one task, or a list")
    places = [f"{path.name}: " + (f"[{index}]." if content is entries else "") for index in range(len(entries))]
    specs, problems = list[TaskSpec](), list[Problem]()
    for place, entry in zip(places, entries, strict=True):
        try:
            specs.append(_spec(entry))
        except SpecError as error:
            problems += _prefix_paths(place, error.problems)
    names = [spec.task for spec in specs]
    problems += [Problem("duplicate", path.name, name, "names two tasks", "use different names")
                 for name in sorted({name for name in names if names.count(name) > 1})]  # fmt: skip
    if problems:
        raise SpecError(problems)
    folder, tasks = path.absolute().parent.resolve(), list[EvaluationTask]()
    for place, spec in zip(places, specs, strict=True):
        try:
            tasks.append(EvaluationTask(spec, read_documents(spec, folder)))
        except SpecError as error:
            raise SpecError(_prefix_paths(place, error.problems)) from None
    return tuple(tasks)


def _spec(entry: Any) -> TaskSpec:
    if not isinstance(entry, dict):
        raise spec_error("wrong_type", "", entry, "must be a task: a mapping of keys", "write its keys")
    fields = TaskSpec.model_fields
    rule = "is not a supported key: tasks are data and run no code"
    remedy = f"omit it; keys are {', '.join(fields)}"
    if unknown := [
        Problem("unknown_key", str(key), value, rule, remedy) for key, value in entry.items() if key not in fields
    ]:
        raise SpecError(unknown)
    return TaskSpec(**entry)


def _prefix_paths(place: str, problems: Iterable[Problem]) -> list[Problem]:
    return [replace(problem, path=(place + problem.path).rstrip(". ")) for problem in problems]


def _refuse_tags(path: Path) -> None:
    """Refuse YAML tags, which could name code.

    Other faults, including excessive nesting, are reported by the parser.
    """
    content = path.read_bytes()
    if path.suffix == ".json" or len(content) > MAX_SPEC_BYTES:
        return
    depth = 0
    try:
        for event in yaml.parse(content, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                return
            tag = getattr(event, "tag", None)
            if tag is not None:
                mark: Any = event.start_mark
                line = mark.line + 1
                raise spec_error("unsupported", f"{path.name}, line {line}", tag, "is a tag, which tasks may not have",
                                 "replace it with plain data")  # fmt: skip
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
