from collections.abc import Iterator

import pytest

from tests.parity.gloo_ranks import Pools


@pytest.fixture(scope="package")
def ranks() -> Iterator[Pools]:
    """Processes with the rehearsal device from their first run on, which other tests do not use."""
    pools = Pools()
    yield pools
    pools.close()
