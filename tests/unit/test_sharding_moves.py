"""Moves between placements: the collective that an engineer would choose, and never one that costs more."""

import itertools

import pytest

from moe.plan import Cluster
from moe.sharding.exchange.moves import Moves
from moe.sharding.placement import WHOLE, partial, split, unpadded_shape

CLUSTER = Cluster(num_nodes=2, devices_per_node=4, device="h100")


def _kinds(degrees, source, target, shape=(4096, 4096)):
    _, moves = Moves(CLUSTER, degrees).cheapest(shape, 4, source, target)
    return [(move.kind, move.axis) for move in moves]


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        (split(0), split(1), "all_to_all"),
        (split(0), WHOLE, "gather"),
        (WHOLE, split(1), "slice"),
        (partial(), WHOLE, "all_reduce"),
        (partial(), split(0), "reduce_scatter"),
        (WHOLE, partial(), "keep_first"),
    ],
    ids=str,
)
def test_one_move_where_one_will_do(source, target, kind):
    assert _kinds((8,), (source,), (target,)) == [(kind, 0)]


def test_moves_of_two_axes_and_other_reductions():
    assert _kinds((2, 4), (split(0), partial()), (split(0), partial())) == []
    assert _kinds((2, 4), (split(0), split(0)), (WHOLE, split(0)))[0] == ("gather", 1)
    assert _kinds((8,), (partial("max"),), (split(0),)) == [("all_reduce", 0), ("slice", 0)]
    with pytest.raises(ValueError, match="partial results of two kinds"):
        _kinds((2, 4), (partial("sum"), partial("max")), (WHOLE, WHOLE))


def test_no_way_by_a_third_placement_is_cheaper():
    moves = Moves(CLUSTER, (2, 4))
    pairs = list(itertools.product([WHOLE, split(0), split(1), partial()], repeat=2))
    cost = {(a, b): moves.cheapest((64, 96), 4, a, b)[0] for a in pairs for b in pairs}
    dims = lambda *layouts: {placement.dim for placements in layouts for placement in placements} - {None}  # noqa: E731
    for a, b, by in itertools.product(pairs, repeat=3):
        if dims(by) <= dims(a, b) and all(
            middle.combine is None or middle.combine == goal.combine for middle, goal in zip(by, b, strict=True)
        ):
            assert cost[a, b] <= cost[a, by] + cost[by, b] + 1e-12


def test_parts_without_padding_make_the_whole():
    for size, degrees in itertools.product(range(1, 12), [(1, 1), (2, 3), (4, 2), (3, 5)]):
        indices = itertools.product(*map(range, degrees))
        parts = [unpadded_shape((size,), (split(0), split(0)), degrees, index)[0] for index in indices]
        assert sum(parts) == size
