"""A node of a test's own: the temporary folder in which recorders spool."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder, of a short name: where it is long, spools lie in /tmp, which tests share. `tempfile` looks
    at TMPDIR once in a process, so its attribute is set, after pytest has made its own folder (`tmp_path`)."""
    with tempfile.TemporaryDirectory(prefix="node-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
