"""Test configuration. Before any other import: one thread a process, as in workers that share cores, and Triton's
interpreter where there is no NVIDIA GPU."""

import gc
import os
import re
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

from tests.grid import PROFILE
from tests.refusals import WORDING

# No deadlines, so that no test fails on a busy machine. `make test-slow` draws the usual number of random cases,
# `make test` a third, and THOROUGH=1 more, unless a test sets the number.
settings.register_profile("quick", deadline=None, max_examples=10)
settings.register_profile("usual", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile(PROFILE)

OWN_HEADS = (
    "tests/deploy/test_built_image.py",
    "tests/kubernetes/test_training.py",
    "tests/object_store/test_jobs_on_ray.py",
    "tests/ray/test_elastic.py",
    "tests/service_cli/test_demo.py",
    "tests/service_cli/test_up.py",
)
"""Files with tests that start Ray heads of their own: one of them at a time."""
SHARING = ("tests/ray", "tests/parity", "tests/deploy")
"""Folders whose files share what is dear to start."""


def scope_of(nodeid: str) -> str:
    """Scope of a test, run in one process by `make test`: its file, or tests that share something."""
    file = nodeid.partition("::")[0]
    if file in OWN_HEADS:
        return "own heads"
    folder = file.rpartition("/")[0]
    return folder if folder in SHARING else file


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="of the chosen tests the K-th of N parts, by a hash of their names")
    parser.addoption(
        "--write-messages", action="store_true", help="write tests/golden/messages.json anew for the tests that run"
    )


_REPORTED: set[str] = set()
"""Tests that ran, in the process that they report to."""
_COLLECTED: set[str] = set()
"""Tests of the files that are written anew, also those that markers exclude."""


def pytest_configure(config: pytest.Config) -> None:
    WORDING.is_written = config.getoption("--write-messages")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _REPORTED.add(report.nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Collect the messages of an xdist process."""
    output = getattr(node, "workeroutput", {})
    WORDING.recorded |= output.get("messages", {})
    _COLLECTED.update(output.get("collected", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not WORDING.is_written:
        return
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["messages"], output["collected"] = WORDING.recorded, sorted(_COLLECTED)
    else:
        WORDING.write(_REPORTED, _COLLECTED)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Before pytest selects by markers: cases beyond the sample of a test become slow. After it: `--part`, and the
    order."""
    mark_beyond_samples(items)
    if WORDING.is_written:
        _COLLECTED.update(item.nodeid for item in items)
    yield
    select_part(config, items)
    sort_scopes(items)


def pytest_collection_finish() -> None:
    """Exclude modules and tests, which stay to the end, from garbage collection."""
    gc.collect()
    gc.freeze()


def mark_beyond_samples(items: list[pytest.Item]) -> None:
    """Keep n evenly spaced cases of each test with `sample(n)`; the others become slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_left_out = any(item.get_closest_marker(marker) for marker in ("slow", "grid"))
        if item.get_closest_marker("sample") is not None and not is_left_out:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test in cases.values():
        sample = test[0].get_closest_marker("sample")
        assert sample is not None
        size = min(sample.args[0], len(test))
        stay = {number * len(test) // size for number in range(size)}
        for number, item in enumerate(test):
            if number not in stay:
                item.add_marker("slow")


def select_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of `--part`."""
    if part := config.getoption("--part"):
        match = re.fullmatch(r"(\d+)/(\d+)", part)
        number, parts = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= number <= parts:
            raise pytest.UsageError(f"--part (={part}) must be K/N, with K from 1 to N")
        selection, rest = [], []
        for item in items:
            (selection if crc32(item.nodeid.encode()) % parts == number - 1 else rest).append(item)
        config.hook.pytest_deselected(items=rest)
        items[:] = selection


def sort_scopes(items: list[pytest.Item]) -> None:
    """Longest scopes first. The two with Ray mostly wait, so others run meanwhile."""
    for item in items:
        if item.get_closest_marker("ray") and scope_of(item.nodeid) not in ("own heads", "tests/ray"):
            raise pytest.UsageError(f"{item.nodeid} needs Ray: tests that do lie in tests/ray, or in OWN_HEADS")
    first = ["own heads", *SHARING]
    items.sort(key=lambda item: first.index(scope) if (scope := scope_of(item.nodeid)) in first else len(first))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all tests of a scope in one process under `--numprocesses`."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Scheduling(config, log)
