"""Mutation test: `python -m benchmarks.mutants`.

Random small faults (in a comparison, an operator, a constant or a condition) are put one at a time into a copy of the
code that computes models and controls jobs; a fault is killed if a relevant test fails. The share of killed faults by
folder and the faults that survive are printed and recorded, and apart from both the faults with which tests do not end.

Relevant are test files by the names that they mention: the changed function, its class and its module, then the
fallbacks of its folder. That takes a minute or two per fault. With `--coverage`, the tests that run the changed line
are, the shortest first, for at most `COVERING_S`; the files only where no test runs it in its own process:

    pip install coverage pytest-cov
    pytest --numprocesses 4 --cov=moe --cov=service --cov-context=test --junitxml durations.xml
    python -m benchmarks.mutants --coverage .coverage --durations durations.xml
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pydantic  # noqa: F401  what most tests import is imported once, before the fork
import pytest
import torch  # noqa: F401

from benchmarks import results

ROOT = Path(__file__).parents[1]
FOLDERS = ("moe/routing", "moe/dispatch", "moe/parallel", "moe/train", "service/control")
FALLBACKS = {
    "moe": ("tests/unit/test_moe_layer.py", "tests/unit/test_train_loop.py", "tests/parity/test_pitfalls.py"),
    "service": ("tests/service/test_api.py", "tests/service/test_lifecycle.py", "tests/service/test_store.py"),
}
MAX_TEST_FILES = 8
TEST_SECONDS = 90
COVERING_S = 20.0
"""Seconds of covering tests per fault, as they took in the run with coverage."""
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One small fault."""

    path: str
    line: int
    change: str
    lines: range
    """Lines of the changed expression, from the first line of its statement."""
    names: tuple[str, ...]
    """Function, class and module, as tests may name them."""
    source: str
    """The module with the fault."""


def points(path: Path) -> Iterator[tuple[int, str]]:
    """(number of the node, change) of all single faults of a module."""
    tree = ast.parse(path.read_text())
    parents = _parents(tree)
    for number, node in enumerate(ast.walk(tree)):
        if _is_in_body(node, parents):
            yield from ((number, change) for change in _changes(node))


def build(path: Path, number: int, change: str) -> Mutant:
    """Build the module with one fault."""
    tree = ast.parse(path.read_text())
    node = next(islice(ast.walk(tree), number, None))
    parents = _parents(tree)
    names, lines = (*_names(node, parents), path.stem), _lines(node, parents)
    _apply(node, change)
    relative = path.relative_to(ROOT).as_posix()
    return Mutant(relative, getattr(node, "lineno", 0), change, lines, names, ast.unparse(tree))


def _parents(tree: ast.Module) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _lines(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> range:
    expression = node.test if isinstance(node, ast.If | ast.While) else node
    statement = node
    while not isinstance(statement, ast.stmt):
        statement = parents[statement]
    return range(statement.lineno, (getattr(expression, "end_lineno", None) or statement.lineno) + 1)


def _is_in_body(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a node is code of a function, not an annotation, decorator or message."""
    in_function = False
    while node in parents:
        parent = parents[node]
        if isinstance(parent, ast.Raise | ast.JoinedStr | ast.Assert | ast.arg | ast.AnnAssign):
            return False
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            if node not in parent.body:
                return False
            in_function = True
        node = parent
    return in_function


def _changes(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield "comparison"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield "operator"
    elif isinstance(node, ast.BoolOp):
        yield "and/or"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not"
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        yield "constant"


def _apply(node: ast.AST, change: str) -> None:
    if isinstance(node, ast.Compare) and change == "comparison":
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp):
        node.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd()  # `not x` becomes `+bool(x)`, its opposite
        node.operand = ast.Call(ast.Name("bool", ast.Load()), [node.operand], [])
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    ast.fix_missing_locations(node)


def _names(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[str]:
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name != "__init__":
            yield node.name


def test_files(mutant: Mutant, texts: dict[str, str]) -> list[str]:
    """Relevant test files for a fault, those with the most mentions first."""
    module_name = mutant.path.removesuffix(".py").replace("/", ".")

    def weight(text: str) -> float:
        mentions = [bool(re.search(rf"\b{re.escape(name)}\b", text)) for name in mutant.names]
        return 4 * (module_name in text) + sum(mentions) + mentions[0]

    weights = {path: weight(text) for path, text in texts.items()}
    likely = [path for path in sorted(weights, key=lambda path: -weights[path]) if weights[path] >= 2]
    fallbacks = [path for path in FALLBACKS[mutant.path.partition("/")[0]] if path in texts]
    return list(dict.fromkeys([*likely[:MAX_TEST_FILES], *fallbacks]))


class CoveringTests:
    """Tests that run a line, by coverage data with one context per test, and their seconds, by a JUnit report. Tests
    that fail without a fault are left out."""

    def __init__(self, coverage: Path, durations: Path) -> None:
        from coverage import CoverageData  # not a requirement

        self._data = CoverageData(str(coverage))
        self._data.read()
        cases = {
            f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": case
            for case in ElementTree.parse(durations).iter("testcase")
        }
        self._seconds = {test: float(case.get("time", 0)) for test, case in cases.items()}
        self._failed = {
            test for test, case in cases.items() if case.find("failure") is not None or case.find("error") is not None
        }

    def find(self, mutant: Mutant) -> list[str]:
        """Ids of tests that run the changed lines, the shortest first."""
        contexts = self._data.contexts_by_lineno(str(ROOT / mutant.path))
        ids = {context.rpartition("|")[0] for line in mutant.lines for context in contexts.get(line, ())}
        ids -= {"", *self._failed}
        tests, total_s = list[str](), 0.0
        for test in sorted(ids, key=lambda test: (self._seconds.get(test, 0.0), test)):
            total_s += self._seconds.get(test, 0.0)
            if tests and total_s > COVERING_S:
                break
            tests.append(test)
        return tests


def outcome(mutant: Mutant, copied_root: Path, files: list[str]) -> str:
    """Outcome of the tests with the fault."""
    target = copied_root / mutant.path
    before = target.read_text()
    target.write_text(mutant.source)
    try:
        return outcome_of_tests(copied_root, files)
    finally:
        target.write_text(before)


def outcome_of_tests(copied_root: Path, files: list[str]) -> str:
    """`killed` if a test fails or none can be run, `survived` if all pass, or `timed out`."""
    child = os.fork()  # torch and the test tools are imported already
    if child == 0:
        try:
            os._exit(_run_tests(copied_root, files))
        finally:
            os._exit(pytest.ExitCode.INTERNAL_ERROR)
    return _wait(child)


def _run_tests(copied_root: Path, files: list[str]) -> int:
    os.setsid()  # a group for the processes of the tests
    os.chdir(copied_root)
    os.environ["PYTHONPATH"] = str(copied_root)
    sys.path.insert(0, str(copied_root))
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silent, descriptor)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", str(TEST_SECONDS)]
    return int(pytest.main([*options, *files]))


def _wait(child: int) -> str:
    deadline = time.monotonic() + TEST_SECONDS
    code: int | None = None
    while code is None and time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
        return "timed out"
    return "survived" if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200, help="faults to try (200)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no fault after this time")
    parser.add_argument("--seed", type=int, default=40)
    parser.add_argument("--folders", nargs="*", default=FOLDERS, help="code that gets the faults")
    parser.add_argument("--coverage", type=Path, help="coverage data of the tests, with a context for each")
    parser.add_argument("--durations", type=Path, help="JUnit report of the same run")
    parser.add_argument("--out", type=Path, help="write the result to this file instead of benchmarks/results")
    arguments = parser.parse_args()
    modules = sorted(path for folder in arguments.folders for path in (ROOT / folder).rglob("*.py"))
    all_points = [(path, *point) for path in modules for point in points(path)]
    sample = random.Random(arguments.seed).sample(all_points, min(arguments.number, len(all_points)))
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))
    }
    covering = CoveringTests(arguments.coverage, arguments.durations) if arguments.coverage else None
    outcomes: list[dict[str, Any]] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copied_root = Path(folder) / "shardyard"
        shutil.copytree(ROOT, copied_root, ignore=shutil.ignore_patterns(".venv*", ".git", "__pycache__", "runs"))
        if outcome_of_tests(copied_root, [FALLBACKS["moe"][0]]) != "survived":
            raise RuntimeError(f"{FALLBACKS['moe'][0]} fails without a fault")
        for path, number, change in sample:
            if time.monotonic() - began > arguments.seconds:
                break
            mutant = build(path, number, change)
            tests = (covering.find(mutant) if covering else []) or test_files(mutant, texts)
            verdict = outcome(mutant, copied_root, tests)
            outcomes.append(
                {"path": mutant.path, "line": mutant.line, "change": mutant.change, "outcome": verdict, "tests": tests}
            )
            print(f"{verdict:9} {mutant.path}:{mutant.line} {mutant.change}", flush=True)
    counts = {
        folder: Counter(entry["outcome"] for entry in outcomes if entry["path"].startswith(folder))
        for folder in arguments.folders
    }
    for folder, count in counts.items():
        print(f"{folder:16} {count['killed']:3} of {sum(count.values()):3} killed, {count['timed out']} timed out")
    num_killed = sum(count["killed"] for count in counts.values())
    print(f"{num_killed} of {len(outcomes)} killed")
    record = {"counts": counts, "survivors": [entry for entry in outcomes if entry["outcome"] != "killed"]}
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1))
    else:
        results.write("mutants", record)


if __name__ == "__main__":
    main()
