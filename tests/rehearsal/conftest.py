from collections.abc import Iterator

import pytest

from tests.parity.gloo_ranks import Pools


@pytest.fixture(scope="package")
def ranks() -> Iterator[Pools]:
    """Processes that have the rehearsal device from their first run on: none of the other tests'."""
    pools = Pools()
    yield pools
    pools.close()
