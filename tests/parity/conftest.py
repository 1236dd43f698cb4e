from collections.abc import Iterator

import pytest

from tests.parity.gloo_ranks import Ranks


class Pools:
    """Ranks by their number, started when first asked for, and anew after a run on them failed."""

    def __init__(self) -> None:
        self._pools: dict[int, Ranks] = {}

    def __getitem__(self, world_size: int) -> Ranks:
        if world_size not in self._pools or self._pools[world_size].ended:
            self._pools[world_size] = Ranks(world_size)
        return self._pools[world_size]

    def close(self) -> None:
        for ranks in self._pools.values():
            ranks.close()


@pytest.fixture(scope="package")
def ranks() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()
