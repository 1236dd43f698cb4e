"""Folders of any family, for whoever reads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interchange import tiny


@pytest.fixture
def hub(tmp_path: Path) -> Callable[..., Path]:
    """A folder in the hub's layout, of any family."""

    def make(family: str, **over: Any) -> Path:
        return tiny.folder_of(tiny.theirs(family, **over), tmp_path / family)

    return make
