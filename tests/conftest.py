"""Before anything else is imported: one thread a process, as workers that share cores run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import pytest

SHARING = ("tests/deploy", "tests/parity", "tests/ray")
"""Folders whose files share what is dear to start."""
WITH_RAY = ("tests/ray", "tests/service_cli")
"""Where `make test` looks for tests that need Ray: going through all files takes seconds."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("ray") and not item.nodeid.startswith(WITH_RAY):
            raise pytest.UsageError(f"{item.nodeid} needs Ray, and lies in none of {', '.join(WITH_RAY)}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--numprocesses`, a file's tests run in one process, and so do those of a folder in SHARING."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder = file.rpartition("/")[0]
            return folder if folder in SHARING else file

    return Scheduling(config, log)
