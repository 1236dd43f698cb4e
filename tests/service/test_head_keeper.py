"""When what died of a Ray head is started again: sooner at first, later and later, and not for ever."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from service.launch.head_keeper import (
    BACKOFF_S,
    MOST_BACKOFF_S,
    MOST_TRIES,
    WITHIN_S,
    GiveUp,
    Pause,
    Try,
    next_try,
)


@given(st.lists(st.floats(0.1, 200.0), min_size=1, max_size=400))
def test_tries_are_bounded_and_wait_for_each_other(looks_after_s: list[float]) -> None:
    """However often somebody looks at a head that never comes up."""
    tries: list[float] = []
    now = 0.0
    for after_s in looks_after_s:
        now += after_s
        match next_try(tries, now):
            case Try():
                tries.append(now)
            case Pause(left_s):
                assert 0 < left_s <= MOST_BACKOFF_S
            case GiveUp():
                assert len(tries) >= MOST_TRIES
    for first, second in pairwise(tries):
        assert second - first >= BACKOFF_S
    for first, one_too_many in zip(tries, tries[MOST_TRIES:], strict=False):
        assert one_too_many - first >= WITHIN_S


def test_the_first_comes_at_once_and_each_waits_twice_as_long() -> None:
    assert next_try([], 0.0) == Try()
    tries = [0.0]
    for wait_s in (2.0, 4.0, 8.0, 16.0, 32.0):
        assert next_try(tries, tries[-1] + wait_s - 0.5) == Pause(0.5)
        assert next_try(tries, tries[-1] + wait_s) == Try()
        tries.append(tries[-1] + wait_s)
    assert next_try(tries, tries[-1] + 500) == GiveUp()
