"""One Ray head for all these tests, and control planes that use it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.launch.local_head import LocalHead
from tests.ray.control_plane import ControlPlane, FinishedJob, job_spec


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/ray/" in item.path.as_posix():
            item.add_marker(pytest.mark.ray)
            # The first starts the head and runs a job before its own.
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHead]:
    """A Ray head of these tests' own."""
    head = LocalHead.start(tmp_path_factory.mktemp("head"), num_cpus=6)
    yield head
    head.stop()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the small corpus is prepared, once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def plane(head: LocalHead, cache: Path, tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane of one test's own, running."""
    plane = ControlPlane(head, cache, tmp_path).start()
    yield plane
    plane.close()


@pytest.fixture(scope="session")
def undisturbed(
    head: LocalHead, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FinishedJob]:
    """The small job, run to its end with nothing in its way: what disturbed runs are compared with."""
    plane = ControlPlane(head, cache, tmp_path_factory.mktemp("undisturbed")).start()
    job = plane.client.submit(job_spec())
    events = list(job.events())
    yield FinishedJob(plane, job.refresh(), events)
    plane.close()
