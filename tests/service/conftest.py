"""Control planes for tests: a shared one for tests that only read, a fresh one for tests that damage it."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from service.control.api.services import Services
from service.control.store.database import Database
from tests.node import node  # noqa: F401, a fixture
from tests.postgres.server import server  # noqa: F401, a fixture
from tests.service.control_plane import TOKEN, ControlPlane
from tests.service.controllers import controller_on, local_cluster
from tests.service.silent_run import Run


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    """Database of the planes and stores of a test: SQLite, unless the test is one of `BOTH_DATABASES`."""
    return str(getattr(request, "param", "sqlite"))


def _store_settings(request: pytest.FixtureRequest, backend: str) -> dict[str, str]:
    return {} if backend == "sqlite" else {"database_url": request.getfixturevalue("server").create()}


@pytest.fixture(scope="module")
def plane(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, backend: str
) -> Iterator[ControlPlane]:
    """A running control plane, the same for all tests of a file."""
    control_plane = ControlPlane(tmp_path_factory.mktemp("plane"), **_store_settings(request, backend)).start()
    yield control_plane
    control_plane.close()


@pytest.fixture(scope="module")
def token_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with a token."""
    control_plane = ControlPlane(tmp_path_factory.mktemp("guarded"), token=TOKEN).start()
    yield control_plane
    control_plane.close()


@pytest.fixture
def own_plane(tmp_path: Path, request: pytest.FixtureRequest, backend: str) -> Iterator[ControlPlane]:
    """A control plane for one test, not yet started."""
    control_plane = ControlPlane(tmp_path, **_store_settings(request, backend))
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
def database(tmp_path: Path, request: pytest.FixtureRequest, backend: str) -> Iterator[Database]:
    url = _store_settings(request, backend).get("database_url", f"sqlite:///{tmp_path / 'shardyard.db'}")
    with closing(Database(url)) as database:
        database.migrate()
        yield database


@pytest.fixture
def run(plane: ControlPlane) -> Iterator[Run]:
    run = Run(plane)
    yield run
    run.end()
