"""API servers of tests: one per module, and one of a test's own where it is killed or refuses."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.control.kubernetes import KubernetesApi
from tests.kubernetes.api_server import ADMIN_TOKEN, CRDS, ApiServer
from tests.node import node  # noqa: F401


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Server of a whole module, whose tests name their objects differently."""
    require_definitions()
    with ApiServer(tmp_path_factory.mktemp("api-server")) as server:
        yield server


@pytest.fixture
def api_server(tmp_path: Path) -> Iterator[ApiServer]:
    require_definitions()
    with ApiServer(tmp_path) as server:
        yield server


@pytest.fixture
def api(shared_server: ApiServer) -> Iterator[KubernetesApi]:
    """Client under test."""
    client = shared_server.api()
    yield client
    client.close()
    shared_server.heal()
    shared_server.deny()


@pytest.fixture
def cluster(shared_server: ApiServer) -> Iterator[KubernetesApi]:
    """Client of the cluster's own controllers."""
    client = shared_server.api(ADMIN_TOKEN)
    yield client
    client.close()


def require_definitions() -> None:
    """Skip the test where KubeRay's definitions are not beside the repository."""
    if not CRDS.is_dir():
        absent = f"KubeRay's definitions are not in {CRDS}"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{absent}; CI must not pass over it")
        pytest.skip(absent)
