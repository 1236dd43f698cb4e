"""The kernels run on a GPU if there is one, and otherwise in Triton's interpreter. Triton is for Linux."""

import importlib.util
from collections.abc import Iterator

import pytest

from tests.parity.gloo_ranks import Pools

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="package")
def ranks() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()
