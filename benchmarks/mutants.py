"""Mutation test: `python -m benchmarks.mutants`.

Small random faults (in a comparison, an operator, a constant or a condition) are inserted one at a time into a copy of
the code. A fault is killed if a test that covers it fails. Prints and records the share killed per folder, survivors,
and faults whose tests ran out of time.

One run of all tests, with a marker before each faulty statement, records which tests execute it, and which test files
do so in a fixture or another process. A fault is tried with the fastest of these, for at most `MAX_TESTS_S`; a fault
that no test executes survives. Tests that fail without a fault are deselected.
"""

import argparse
import ast
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil

from benchmarks import results

ROOT = Path(__file__).parents[1]
FOLDERS = ("moe/routing", "moe/dispatch", "moe/parallel", "moe/train", "service/control")
MAX_TESTS_S = 90.0
"""Limit on the total duration of the tests of a fault, by their durations in the run with markers."""
TRIAL_S = 300.0
"""Timeout of all tests of a fault."""
TEST_S = 90.0
"""Timeout of one test, which then fails."""
MARKER = """import json
import os
import sys
from contextlib import suppress

process = os.getpid() if "pytest" in sys.modules else None
marked = set()


def mark(number):
    test, _, phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
    if process != os.getpid() or phase != "(call)":
        test = test.partition("::")[0]
    if "MARKS" in os.environ and test and (number, test) not in marked:
        marked.add((number, test))
        with suppress(OSError):
            file = os.open(f"{os.environ['MARKS']}/{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.write(file, json.dumps([number, test]).encode() + b"\\n")
            os.close(file)
"""
"""Module `statement_marker` of the marked copy. `mark` records that the current test executed a statement; or that its
file did, in a fixture or another process."""
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One small fault."""

    path: str
    """Of the module, from the root of the repository."""
    number: int
    """Of the changed node, in the order of `ast.walk`."""
    change: str

    def read(self) -> tuple[ast.Module, ast.AST]:
        """The module without the fault, and the node to change."""
        tree = ast.parse((ROOT / self.path).read_text())
        return tree, next(islice(ast.walk(tree), self.number, None))

    @property
    def line(self) -> int:
        return int(getattr(self.read()[1], "lineno", 0))

    def mutated(self) -> str:
        """Source of the module with the fault."""
        tree, node = self.read()
        _apply(node, self.change)
        return ast.unparse(tree)


def fault_sites(path: Path) -> Iterator[tuple[int, str]]:
    """(number of the node, change) of all single faults of a module."""
    tree = ast.parse(path.read_text())
    parents = _parents(tree)
    for number, node in enumerate(ast.walk(tree)):
        if _is_in_body(node, parents):
            yield from ((number, change) for change in _changes(node))


def _parents(tree: ast.Module) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


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
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    ast.fix_missing_locations(node)


def write_markers(faults: Sequence[Fault], copied_root: Path) -> None:
    """Put a marker before the statement of each fault."""
    (copied_root / "statement_marker.py").write_text(MARKER)
    for path in sorted({fault.path for fault in faults}):
        tree = ast.parse((ROOT / path).read_text())
        nodes, parents = list(ast.walk(tree)), _parents(tree)
        for number, fault in enumerate(faults):
            if fault.path == path:
                _insert_marker(nodes[fault.number], parents, number)
        (copied_root / path).write_text(ast.unparse(ast.fix_missing_locations(tree)))


def _insert_marker(node: ast.AST, parents: dict[ast.AST, ast.AST], number: int) -> None:
    while not isinstance(node, ast.stmt):
        node = parents[node]
    for _, statements in ast.iter_fields(parents[node]):
        if isinstance(statements, list) and node in statements:
            call = ast.parse(f"__import__('statement_marker').mark({number})").body[0]
            statements.insert(statements.index(node), call)


@dataclass(frozen=True)
class MarkedRun:
    """Result of the run with markers."""

    tests: Mapping[int, set[str]]
    """Tests and test files that execute the statement of a fault, by its number in the sample."""
    seconds: Mapping[str, float]
    """Of each test, and of each file."""
    failed: Sequence[str]
    """Ids of tests that fail without a fault."""

    def tests_for(self, number: int) -> list[str]:
        """Tests and files for a fault, the fastest first."""
        marked = {test if test.isprintable() else test.partition("::")[0] for test in self.tests.get(number, ())}
        marked -= {test for test in marked if "::" in test and test.partition("::")[0] in marked}
        chosen, total_s = list[str](), 0.0
        for test in sorted(marked - {*self.failed}, key=lambda test: (self.seconds.get(test, 0.0), test)):
            total_s += self.seconds.get(test, 0.0)
            if chosen and total_s > MAX_TESTS_S:
                break
            chosen.append(test)
        return chosen


def run_with_markers(faults: Sequence[Fault], copied_root: Path, tests: Sequence[str]) -> MarkedRun:
    write_markers(faults, copied_root)
    marks, report = copied_root / "marks", copied_root / "report.xml"
    marks.mkdir()
    options = ["--numprocesses", "4", "--no-loadscope-reorder", "--quiet", "--junitxml", str(report), *tests]
    run_tests(copied_root, options, {"MARKS": str(marks)}, timeout_s=None)
    marked: dict[int, set[str]] = {}
    for line in (line for file in marks.iterdir() for line in file.read_text().splitlines()):
        number, test = json.loads(line)
        marked.setdefault(number, set()).add(test)
    seconds, failed = dict[str, float](), list[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        file, *classes = _test_file(copied_root, case.get("classname", ""))
        test, test_s = "::".join([file, *classes, case.get("name", "")]), float(case.get("time", 0))
        seconds[test] = test_s
        seconds[file] = seconds.get(file, 0.0) + test_s
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(test)
    return MarkedRun(marked, seconds, failed)


def _test_file(copied_root: Path, class_name: str) -> list[str]:
    """Test file of a JUnit report's `classname`, then its class, if there is one."""
    module, _, name = class_name.rpartition(".")
    if (copied_root / f"{class_name.replace('.', '/')}.py").exists():
        return [f"{class_name.replace('.', '/')}.py"]
    return [f"{module.replace('.', '/')}.py", name]


def run_tests(
    copied_root: Path, options: Sequence[str], environment: Mapping[str, str], timeout_s: float | None
) -> int | None:
    """Exit code of pytest, or None after `timeout_s`. Ends the processes that it leaves."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=copied_root,
        env={**os.environ, "PYTHONPATH": str(copied_root), "MUTATED_ROOT": str(copied_root), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_processes(copied_root)


def end_processes(copied_root: Path) -> None:
    """Kill all processes that tests of the copy started."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MUTATED_ROOT") == str(copied_root):
                process.kill()


def outcome(fault: Fault, copied_root: Path, tests: Sequence[str], failed: Sequence[str]) -> str:
    """`killed` if a test fails, `survived` if all pass, or `timed out`."""
    if not tests:
        return "survived"
    target = copied_root / fault.path
    before = target.read_text()
    target.write_text(fault.mutated())
    try:
        deselected = [option for test in failed if test.partition("::")[0] in tests for option in ("--deselect", test)]
        options = ["-x", "--quiet", "-n", "0", "--timeout", str(TEST_S), *deselected, *tests]
        code = run_tests(copied_root, options, {}, TRIAL_S)
    finally:
        target.write_text(before)
    if code is None:
        return "timed out"
    return "survived" if code in PASSED else "killed"


PASSED = (0, 5)
"""Exit codes of pytest: all tests passed, or none were collected. With a fault in an import, it is another."""


def copy(folder: Path) -> Path:
    ignore = shutil.ignore_patterns(".venv*", ".git", "__pycache__", "runs")
    return Path(shutil.copytree(ROOT, folder, ignore=ignore, symlinks=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200, help="faults to try (200)")
    parser.add_argument("--seed", type=int, default=40)
    parser.add_argument("--folders", nargs="*", default=FOLDERS, help="code that gets the faults")
    parser.add_argument("--tests", nargs="*", default=[], help="tests to try them with (all)")
    parser.add_argument("--processes", type=int, default=2, help="faults to try at a time (2)")
    parser.add_argument("--out", type=Path, help="write the result to this file instead of benchmarks/results")
    arguments = parser.parse_args()
    modules = sorted(path for folder in arguments.folders for path in (ROOT / folder).rglob("*.py"))
    all_faults = [Fault(path.relative_to(ROOT).as_posix(), *site) for path in modules for site in fault_sites(path)]
    faults = random.Random(arguments.seed).sample(all_faults, min(arguments.number, len(all_faults)))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        marked_run = run_with_markers(faults, copy(Path(folder) / "marked" / "shardyard"), arguments.tests)
        print(
            f"{len(marked_run.failed)} tests fail without a fault, {len(marked_run.tests)} statements run", flush=True
        )
        copies = queue.SimpleQueue[Path]()
        for number in range(arguments.processes):
            copies.put(copy(Path(folder) / str(number) / "shardyard"))

        def try_fault(number: int) -> dict[str, Any]:
            copied_root, tests = copies.get(), marked_run.tests_for(number)
            try:
                verdict = outcome(faults[number], copied_root, tests, marked_run.failed)
            finally:
                copies.put(copied_root)
            fault = faults[number]
            print(f"{number:3} {verdict:9} {fault.path}:{fault.line} {fault.change}", flush=True)
            return {
                "path": fault.path, "line": fault.line, "change": fault.change, "outcome": verdict, "tests": tests,
            }  # fmt: skip

        with ThreadPoolExecutor(arguments.processes) as pool:
            outcomes = list(pool.map(try_fault, range(len(faults))))
    counts = {
        folder: Counter(entry["outcome"] for entry in outcomes if entry["path"].startswith(folder))
        for folder in arguments.folders
    }
    for name, count in counts.items():
        print(f"{name:16} {count['killed']:3} of {sum(count.values()):3} killed, {count['timed out']} timed out")
    print(f"{sum(count['killed'] for count in counts.values())} of {len(outcomes)} killed")
    record = {
        "counts": counts,
        "tests that fail without a fault": marked_run.failed,
        "survivors": [entry for entry in outcomes if entry["outcome"] != "killed"],
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1))
    else:
        results.write("mutants", record)


if __name__ == "__main__":
    main()
