"""Control planes that the command talks to: real ones, with the local launcher."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.control_plane import ControlPlane


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A running control plane, the same for all tests of a file."""
    control_plane = ControlPlane(tmp_path_factory.mktemp("plane")).start()
    yield control_plane
    control_plane.close()


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A small job of five steps."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: small\nlabels: {team: research}\nmodel: {preset: gshard-tiny}\ndata: {corpus: catalogs}\n"
        "train: {num_steps: 5, batch_tokens: 1024}\n"
    )
    return path
