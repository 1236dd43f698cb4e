"""One Ray head for all these tests, and control planes that use it."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from service.head.local_head import LocalHead
from service.wire.events import Event
from tests.listening import Address, listening_addresses
from tests.ray.control_plane import ControlPlane, FinishedJob, job_spec


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/ray/" in item.path.as_posix():
            item.add_marker(pytest.mark.ray)
            # The first test also starts the head and runs a job.
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="package")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHead]:
    """These tests' own Ray head."""
    head = LocalHead.start(tmp_path_factory.mktemp("head"), num_cpus=6)
    yield head
    head.stop()


@pytest.fixture(scope="package")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache in which the small corpus is prepared, once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def plane(head: LocalHead, cache: Path, tmp_path: Path) -> Iterator[ControlPlane]:
    """A test's own control plane, running."""
    plane = ControlPlane(head, cache, tmp_path).start()
    yield plane
    plane.close()


@pytest.fixture(scope="package")
def reference_job(head: LocalHead, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FinishedJob]:
    """The small job after an undisturbed run, which disturbed runs are compared with."""
    plane = ControlPlane(head, cache, tmp_path_factory.mktemp("undisturbed")).start()
    job = plane.client.submit(job_spec())
    events: list[Event] = []
    listening: list[Address] = []
    actors: list[str] = []
    for event in job.events():
        events.append(event)
        if event.kind == "metric" and not listening:
            roots = [psutil.Process(process.pid) for node in head.nodes for process in node.processes]
            running = [*roots, *(child for root in roots for child in root.children(recursive=True))]
            listening = listening_addresses(running)
            actors = sorted(re.findall(r"^ray::(\w+)", titles(running), flags=re.MULTILINE))
    yield FinishedJob(plane, job.refresh(), events, listening, actors)
    plane.close()


def titles(processes: Iterable[psutil.Process]) -> str:
    """Titles of the processes that still run, one a line."""
    lines = []
    for process in processes:
        with suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return "\n".join(lines)
