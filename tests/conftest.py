"""Before anything else is imported: one thread a process, as workers that share cores run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, a folder's tests run in one process: they share what is dear to start, such as a Ray head."""
    from xdist.scheduler import LoadScopeScheduling

    class FolderScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0].rpartition("/")[0]

    return FolderScheduling(config, log)
