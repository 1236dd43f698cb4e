"""A node for recorders: its temporary folder, where they spool, is the test's own."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder. `tempfile` looks at TMPDIR once in a process, so it is told directly."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
