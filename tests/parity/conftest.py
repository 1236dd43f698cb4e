from collections.abc import Iterator

import pytest

from tests.parity.gloo_ranks import Pools


@pytest.fixture(scope="package")
def ranks() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()
