"""All ranks end their process groups in one order: over NCCL, whoever ends a group waits for its other ranks."""

from itertools import combinations

import pytest
import torch.distributed as dist

from moe.parallel import Layout
from tests.parity.combinations import LAYOUTS
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape

ON_FOUR_RANKS = [degrees for layouts in LAYOUTS.values() for degrees in layouts if degrees.workers == 4]


def orders(degrees: Degrees) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The ranks of each group that this rank is in, in the order in which they are made, and in which they end."""
    layout = Layout.build(degrees.plan(Shape().groups))
    made = [ranks_of(group) for group in dict.fromkeys(layout.groups.values()) if group != dist.group.WORLD]
    ended, end = [], dist.destroy_process_group

    def recorded(group: dist.ProcessGroup) -> None:
        ended.append(ranks_of(group))
        end(group)

    dist.destroy_process_group = recorded
    dist.barrier()  # gloo's groups are connected on all ranks before one ends its own
    try:
        layout.close()
    finally:
        dist.destroy_process_group = end
    return made, ended


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


@pytest.mark.sample(5)
@pytest.mark.parametrize("degrees", ON_FOUR_RANKS, ids=str)
def test_the_last_group_made_ends_first_on_all_ranks(ranks: Pools, degrees: Degrees) -> None:
    answers = ranks[4].run(orders, degrees)
    assert all(ended == made[::-1] for made, ended in answers)
    for (one, (its_made, _)), (other, (others_made, _)) in combinations(enumerate(answers), 2):
        shared = [group for group in its_made if other in group]
        assert shared == [group for group in others_made if one in group]
