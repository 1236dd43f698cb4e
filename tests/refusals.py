"""Checks of refused input: the code, path and value of each problem. Wording may change freely: it is compared only
with tests/golden/messages.json, which `make messages` writes."""

import json
import multiprocessing
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import hypothesis
import pytest

from moe.spec import Problem, ProblemCode, SpecError

GOLDEN = Path(__file__).parent / "golden" / "messages.json"
REPOSITORY = Path(__file__).parents[1]

Summary = tuple[str, str, Any]
"""(code, path, value)"""

_TEMPORARY = re.compile(
    re.escape(tempfile.gettempdir()) + r"/(pytest-of-[^/]+/pytest-\d+/(popen-gw\d+/)?\w+?\d+|tmp[a-z0-9_]{8})\b"
)
"""A temporary folder. pytest numbers those of tests, in the order in which a process runs them."""

_DIGEST = re.compile(r"\b[0-9a-f]{32}([0-9a-f]{32})?\b")
"""Digests cover versions of packages and files of the product, so that they change with either."""


_EQUAL_FOLDERS = re.compile(r"(/[^/]+)\1{3,}")
"""Folders that a test makes down to a depth: how many, depends on the depth of pytest's own folder."""


_LINE = re.compile(r"(tests/[\w/]+\.py):\d+")
"""A line of a test: its number changes with every edit above it."""


class Wording:
    """Messages of refusals by test, in order: those of this run and the golden ones."""

    def __init__(self) -> None:
        self.is_written = False
        self.recorded: dict[str, list[str]] = {}
        self.golden: dict[str, list[str]] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}

    def check(self, test: str, message: str) -> None:
        """Compare a test's next message with the golden one, or record it. Tests missing in the golden file, such as
        slow ones, are not compared."""
        messages = self.recorded.setdefault(test, [])
        messages.append(message)
        golden = self.golden.get(test)
        if golden is not None and not self.is_written:
            assert messages == golden[: len(messages)], (
                "the wording changed: look at it, then `pytest --write-messages FILE`, or `make messages` for all"
            )

    def write(self, tests: Collection[str], collected: Collection[str]) -> None:
        """Write the golden file: new messages of the tests that ran, and old ones of other existing tests. In collected
        files, those are the collected tests."""
        files = {_file_of(test) for test in collected}
        rest = {
            test: messages
            for test, messages in self.golden.items()
            if test not in tests and (test in collected if _file_of(test) in files else _exists(test))
        }
        text = json.dumps({**rest, **self.recorded}, indent=1, ensure_ascii=False, sort_keys=True)
        GOLDEN.write_text(text + "\n")


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _exists(test: str) -> bool:
    file, _, name = test.partition("[")[0].partition("::")
    path = REPOSITORY / file
    return path.exists() and f"def {name.rpartition('::')[2]}(" in path.read_text()


WORDING = Wording()


@contextmanager
def expect_problem(code: ProblemCode, path: str, value: Any = ANY) -> Iterator[pytest.ExceptionInfo[SpecError]]:
    """Expect a SpecError with one problem."""
    with expect_problems([(code, path, value)]) as error:
        yield error


@contextmanager
def expect_problems(expected: Iterable[Summary]) -> Iterator[pytest.ExceptionInfo[SpecError]]:
    """Expect a SpecError with these problems, in any order."""
    with pytest.raises(SpecError) as error:
        yield error
    check(error.value.problems, expected)


def check(problems: Iterable[Problem | Mapping[str, Any]], expected: Iterable[Summary]) -> None:
    """Compare problems, or the `errors` of an HTTP response, with their summaries, in any order."""
    bodies = [problem.to_dict() if isinstance(problem, Problem) else problem for problem in problems]
    summaries = [(body["code"], body["path"], body["value"]) for body in bodies]
    assert sorted(summaries, key=_code_and_path) == sorted(expected, key=_code_and_path)
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
    if multiprocessing.parent_process() is not None or hypothesis.currently_in_test_context():
        return
    for body in bodies:
        message = str(Problem(**body))
        if tempfile.gettempdir() in message and "..." in message:
            continue  # a long path is truncated depending on its folder
        message = _TEMPORARY.sub("TMP", message).replace(str(REPOSITORY), ".")
        message = _LINE.sub(r"\1:LINE", _EQUAL_FOLDERS.sub(r"\1\1...", message))
        WORDING.check(test, _DIGEST.sub("DIGEST", message))


def _code_and_path(summary: Summary) -> tuple[str, str]:
    return summary[:2]
