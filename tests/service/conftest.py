"""Control planes for tests: a shared one for tests that only read, a fresh one for tests that damage it."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from service.control.api.services import Services
from service.control.store.database import Database
from tests.node import node  # noqa: F401, a fixture
from tests.service.control_plane import TOKEN, ControlPlane
from tests.service.controllers import controller_on, local_cluster
from tests.service.silent_run import Run


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A running control plane, the same for all tests of a file."""
    control_plane = ControlPlane(tmp_path_factory.mktemp("plane")).start()
    yield control_plane
    control_plane.close()


@pytest.fixture(scope="module")
def token_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with a token."""
    control_plane = ControlPlane(tmp_path_factory.mktemp("guarded"), token=TOKEN).start()
    yield control_plane
    control_plane.close()


@pytest.fixture
def own_plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane for one test, not yet started."""
    control_plane = ControlPlane(tmp_path)
    yield control_plane
    control_plane.close()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    """A controller for one test, which steps it by hand, on a cluster of one node."""
    cluster = local_cluster(tmp_path)
    services = controller_on(tmp_path, cluster)
    yield services
    cluster.end_all()
    services.database.close()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with closing(Database(f"sqlite:///{tmp_path / 'shardyard.db'}")) as database:
        database.migrate()
        yield database


@pytest.fixture
def run(plane: ControlPlane) -> Iterator[Run]:
    run = Run(plane)
    yield run
    run.end()
