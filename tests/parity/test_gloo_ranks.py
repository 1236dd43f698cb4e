"""The ranks of these tests: a run that fails leaves nothing to the next one."""

from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from moe.parallel import Layout
from tests.listening import listening_addresses
from tests.parity.combinations import model_of, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, run


def fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError("as it was asked to")
    return "an answer that nobody reads"


def state() -> tuple[set[str], int]:
    """(addresses that this process listens on, its threads)"""
    process = psutil.Process()
    return {str(address) for address in listening_addresses([process])}, process.num_threads()


def test_after_a_failure_the_next_run_has_fresh_ranks_which_listen_on_loopback_alone(ranks: Pools) -> None:
    with pytest.raises(AssertionError, match="ValueError: as it was asked to"):
        ranks[2].run(fail_on, 0)
    assert ranks[2].run(dist.get_rank) == [0, 1]
    assert [addresses for addresses, _ in ranks[2].run(state)] == [{"127.0.0.1"}] * 2


def test_a_run_leaves_no_threads(ranks: Pools) -> None:
    """Threads of process groups wake often and would slow later tests."""
    expert_layout, sharded_layout = Degrees(expert=4), Degrees(data=4, fsdp=2, expert_fsdp=2)
    ranks[4].run(run, model_of(), train_of(), expert_layout, Shape(), 1)  # starts autograd's threads
    before = ranks[4].run(state)
    ranks[4].run(run, model_of(), train_of(), sharded_layout, Shape(), 1)
    after = ranks[4].run(state)
    assert all(
        threads_after <= threads_before for (_, threads_after), (_, threads_before) in zip(after, before, strict=True)
    ), (before, after)


def gloo_threads_of(degrees: Degrees) -> int:
    """Threads of gloo devices beside the process groups of a layout."""
    layout = Layout.build(degrees.plan(num_groups=8))
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    layout.close()
    return names.count("gloo_tcp_loop")


def test_all_process_groups_of_a_rank_share_a_gloo_device(ranks: Pools) -> None:
    assert ranks[4].run(gloo_threads_of, Degrees(data=4, fsdp=2, expert_fsdp=2)) == [1] * 4


def test_they_end_with_the_last_test_of_this_folder(request: pytest.FixtureRequest) -> None:
    """A fixture of a folder that is not a package lives as long as the session."""
    assert request.node.getparent(pytest.Package).path == request.path.parent
