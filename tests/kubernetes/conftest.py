"""An API server per test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.api_server import CRDS, ApiServer


@pytest.fixture
def api_server(tmp_path: Path) -> Iterator[ApiServer]:
    require_definitions()
    with ApiServer(tmp_path) as server:
        yield server


def require_definitions() -> None:
    """Skip the test where KubeRay's definitions are not beside the repository."""
    if not CRDS.is_dir():
        absent = f"KubeRay's definitions are not in {CRDS}"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{absent}; CI must not pass over it")
        pytest.skip(absent)
