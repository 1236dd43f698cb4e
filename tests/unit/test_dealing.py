"""Units dealt to stages on pools, beside trying every way to deal them."""

from collections.abc import Iterator, Sequence
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from moe.plan.cost.dealing import Dealer
from moe.plan.cost.stages import Stage
from moe.plan.cost.units import Unit

KINDS = [Unit(f"kind {number}", ()) for number in range(3)]
WEIGHTS = dict(zip(KINDS, (1, 2, 5), strict=True))


def every_way(num_units: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Ends of runs of one unit at least."""
    for cuts in combinations(range(1, num_units), num_stages - 1):
        yield (*cuts, num_units)


def anything(stage: Stage) -> bool:
    return True


def weight(stage: Stage) -> int:
    return sum(count * WEIGHTS[unit] for unit, count in stage.units)


def slowest_s(dealer: Dealer, ends: Sequence[int], of_units: Sequence[Sequence[float]]) -> float:
    return max(dealer.seconds(stage, of_units) for stage in dealer.stages(ends))


@given(st.data())
def test_the_slowest_stage_is_as_fast_as_in_any_way_that_fits(data: st.DataObject) -> None:
    units = data.draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=9))
    pools = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=min(4, len(units))))
    rooms = data.draw(st.lists(st.integers(1, 30), min_size=len(pools), max_size=len(pools)))
    dealer = Dealer(units, pools)
    seconds = st.lists(st.floats(0.001, 10), min_size=len(dealer.kinds), max_size=len(dealer.kinds))
    of_units = data.draw(st.lists(seconds, min_size=3, max_size=3))

    def fits(stage: Stage) -> bool:
        return weight(stage) <= rooms[stage.index]

    ways = [
        slowest_s(dealer, ends, of_units)
        for ends in every_way(len(units), len(pools))
        if all(map(fits, dealer.stages(ends)))
    ]
    dealt = dealer.deal(of_units, fits)
    assert dealer.can_be_dealt(fits) == bool(ways) == (dealt is not None)
    if dealt is None:
        return
    assert len(dealt) == len(pools)
    assert all(map(fits, dealer.stages(dealt)))
    assert slowest_s(dealer, dealt, of_units) == min(ways)
    assert dealer.least_s(of_units) <= min(ways) * (1 + 1e-9)


def test_what_is_left_is_dealt_evenly() -> None:
    """Where one stage has to be longer, the others are not cut short for it."""
    (unit, *_) = KINDS
    ends = Dealer([unit] * 26, [0] * 8).deal([[1.0]], anything)
    assert ends is not None
    runs = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    assert sorted(runs) == [3] * 6 + [4] * 2
    ends = Dealer([unit] * 12, [0, 1]).deal([[1.0], [3.0]], anything)
    assert ends == (9, 12)
