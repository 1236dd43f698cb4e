"""Balanced pipeline stages against every cut."""

from itertools import accumulate, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from moe.plan.cost.balance import balanced_stages

SECONDS = st.lists(st.sampled_from([0.5, 1.0, 1.0, 1.5, 3.0]), min_size=1, max_size=9)
ROUNDED_SECONDS = st.lists(st.floats(0.01, 0.1), min_size=1, max_size=9)  # sums in another order differ


def every_cut(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    inner = combinations(range(1, num_layers), num_stages - 1)
    return [tuple(end - start for start, end in pairwise((0, *ends, num_layers))) for ends in inner]


def slowest_s(seconds: list[float], stages: tuple[int, ...]) -> float:
    ends = list(accumulate(stages))
    return max(sum(seconds[start:end]) for start, end in pairwise([0, *ends]))


@given(SECONDS | ROUNDED_SECONDS, st.data())
def test_no_cut_has_a_faster_slowest_stage(seconds: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(seconds)))
    stages = balanced_stages(seconds, num_stages)
    assert (len(stages), sum(stages), min(stages) >= 1) == (num_stages, len(seconds), True)
    best_s = min(slowest_s(seconds, cut) for cut in every_cut(len(seconds), num_stages))
    assert slowest_s(seconds, stages) <= best_s * (1 + 1e-6)


def test_equal_layers_are_even_and_a_slow_head_has_fewer_beside_it() -> None:
    assert balanced_stages([1.0] * 8, 4) == (2, 2, 2, 2)
    assert balanced_stages([1.0] * 7 + [3.0], 4) == (2, 3, 2, 1)


def test_the_first_stage_has_all_remaining_layers_though_their_sum_from_the_last_is_larger() -> None:
    assert 0.1 + 0.4 + 0.2 < 0.2 + 0.4 + 0.1
    assert balanced_stages([0.1, 0.4, 0.2, 0.6], 2) == (3, 1)
