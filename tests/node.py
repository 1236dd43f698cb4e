"""A test's own node: the temporary folder in which recorders spool."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary folder with a short name: with a long one, spools lie in /tmp, which tests share. `tempfile` reads
    TMPDIR once a process, so its attribute is set after pytest has created `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="node-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
