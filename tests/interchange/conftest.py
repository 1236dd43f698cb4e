"""Folders of any family, and ranks that read them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interchange import tiny
from tests.parity.gloo_ranks import Pools


@pytest.fixture
def hub(tmp_path: Path) -> Callable[..., Path]:
    """A folder in the hub's layout, of any family."""

    def make(family: str, **overrides: Any) -> Path:
        return tiny.folder_of(tiny.their_model(family, **overrides), tmp_path / family)

    return make


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()
