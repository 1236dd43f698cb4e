"""The ranks that these tests run on: a run that fails leaves nothing to the next one."""

import psutil
import pytest
import torch.distributed as dist

from tests.listening import listening_addresses
from tests.parity.gloo_ranks import Pools


def fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError("as it was asked to")
    return "an answer that nobody reads"


def test_after_a_failure_the_next_run_has_fresh_ranks(ranks: Pools) -> None:
    with pytest.raises(AssertionError, match="ValueError: as it was asked to"):
        ranks[2].run(fail_on, 0)
    assert ranks[2].run(dist.get_rank) == [0, 1]


def listening() -> list[str]:
    return [str(each) for each in listening_addresses([psutil.Process()])]


def test_they_listen_on_loopback_alone(ranks: Pools) -> None:
    for each in ranks[2].run(listening):
        assert set(each) == {"127.0.0.1"}
