"""Before anything else is imported: one thread a process, as workers that share cores run."""

import os
import re

os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

settings.register_profile("untimed", settings.default, deadline=None)  # a busy machine fails no test
settings.load_profile("untimed")

OWN_HEADS = ("tests/ray/test_elastic.py", "tests/service_cli/test_demo.py", "tests/service_cli/test_up.py")
"""Files with tests that start Ray heads of their own: one of them at a time."""
SHARING = ("tests/ray", "tests/parity", "tests/deploy")
"""Folders whose files share what is dear to start."""


def scope_of(nodeid: str) -> str:
    """What `make test` runs in one process: a file's tests, and those that share something."""
    file = nodeid.partition("::")[0]
    if file in OWN_HEADS:
        return "own heads"
    folder = file.rpartition("/")[0]
    return folder if folder in SHARING else file


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", metavar="K/N", help="of the chosen tests the K-th of N parts, by a hash of their names"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The scopes that take longest come first. The two with Ray mostly wait: others compute meanwhile."""
    if part := config.getoption("--part"):
        match = re.fullmatch(r"(\d+)/(\d+)", part)
        at, parts = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= at <= parts:
            raise pytest.UsageError(f"--part (={part}) must be K/N, with K from 1 to N")
        chosen, others = [], []
        for item in items:
            (chosen if crc32(item.nodeid.encode()) % parts == at - 1 else others).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = chosen
    for item in items:
        if item.get_closest_marker("ray") and scope_of(item.nodeid) not in ("own heads", "tests/ray"):
            raise pytest.UsageError(
                f"{item.nodeid} needs Ray: tests that do lie in tests/ray, or in OWN_HEADS"
            )
    first = ["own heads", *SHARING]
    items.sort(
        key=lambda item: first.index(scope) if (scope := scope_of(item.nodeid)) in first else len(first)
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--numprocesses`, a scope's tests run in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Scheduling(config, log)
