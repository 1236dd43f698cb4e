"""The choice between layouts at the centre and both ends of a software's spread: tables, and laws over random times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.plan import Degrees
from moe.plan.candidate import Candidate
from moe.plan.search.spread import NEAR, WITHIN_ERROR, LayoutChoice, SpreadEnd, choose
from moe.plan.software import SOFTWARE

CANDIDATES = [
    *(Candidate(Degrees(data=2**power)) for power in range(3)),
    Candidate(Degrees(expert=4, expert_tensor=2)),
    Candidate(Degrees(tensor=2, pipeline=2)),
]
"""Three along no further axis, one along one, one along two."""
PLAIN, OTHER, LAST, ONE_AXIS, TWO_AXES = CANDIDATES


def choice_of(centre: list[float], *ends: list[float]) -> LayoutChoice:
    """The choice of candidates by their seconds, in the order of CANDIDATES."""
    between = dict(zip(CANDIDATES, centre, strict=True))
    order = sorted(CANDIDATES, key=between.__getitem__)
    spread = []
    for number, seconds in enumerate(ends):
        times = dict(zip(CANDIDATES, seconds, strict=True))
        spread.append(SpreadEnd(f"end {number}", times.__getitem__, min(CANDIDATES, key=times.__getitem__)))
    return choose(order, between.__getitem__, spread)


CHOICES: dict[str, tuple[list[list[float]], Candidate, str | None]] = {
    "the fastest": ([[1, 2, 2, 2, 2]], PLAIN, ""),
    "the fastest at the centre and both ends": (
        [[1, 1.2, 2, 2, 2], [1, 1.1, 2, 2, 2], [1, 1.1, 2, 2, 2]], PLAIN, ""),
    "better at the centre and one end, however slow at the other": (
        [[0.94, 1.08, 2, 2, 2], [0.95, 0.8, 2, 2, 2], [1.2, 1.25, 2, 2, 2]], PLAIN,
        "the bounds of the software disagree: at end 0, expert 1 x data 2, micro-batches of 1 would be 18.7% "
        "faster"),
    "the simplest within the error": (
        [[1.035, 2, 2, 1.0, 2], [1.03, 2, 2, 1.0, 2], [1.04, 2, 2, 1.0, 2]], PLAIN,
        "splits along fewer axes than expert 4 x data 1 x expert_tensor 2"),
    "not the simplest beyond the error": ([[1.06, 2, 2, 1.0, 2]], ONE_AXIS, None),
    "not the simplest where it is slow at an end": (
        [[1.035, 2, 2, 1.0, 2], [1.0, 2, 2, 1.0, 2], [1.3, 2, 2, 1.0, 2]], ONE_AXIS, None),
    "the simpler of two": ([[2, 2, 2, 1.02, 1.0]], ONE_AXIS, None),
    "as simple and faster at both bounds": (
        [[1.0, 1.01, 2, 2, 2], [1.2, 1.0, 2, 2, 2], [1.1, 1.0, 2, 2, 2]], OTHER, "faster at both bounds"),
}  # fmt: skip
"""(seconds at the centre and at the ends, the chosen candidate, part of its reason: none if empty)"""


@pytest.mark.parametrize("case", CHOICES)
def test_choices(case: str) -> None:
    seconds, candidate, reason = CHOICES[case]
    choice = choice_of(*seconds)
    assert choice.candidate == candidate
    if reason is not None:
        assert reason in "".join(choice.reasons)
        assert bool(choice.reasons) == bool(reason)


SECONDS = st.lists(st.floats(0.5, 2.0), min_size=5, max_size=5)


@given(SECONDS, SECONDS, SECONDS)
def test_no_choice_is_slower_than_the_fastest_by_more_than_the_error(centre, first, second) -> None:
    choice = choice_of(centre, first, second)
    seconds = dict(zip(CANDIDATES, centre, strict=True))
    assert seconds[choice.candidate] <= WITHIN_ERROR * min(centre)
    fastest = min(CANDIDATES, key=seconds.__getitem__)
    assert choice.candidate.degrees.num_further_axes <= fastest.degrees.num_further_axes
    is_slow = any(
        end[CANDIDATES.index(choice.candidate)] > NEAR * min(end) for end in (first, second)
    )  # fmt: skip
    assert ("disagree" in "".join(choice.reasons)) == is_slow


@given(SECONDS, SECONDS, SECONDS, st.lists(st.floats(0.3, 1.0), min_size=15, max_size=15))
def test_a_choice_on_better_hardware_is_no_slower(centre, first, second, shares) -> None:
    """However much faster each layout becomes at the centre and at either end."""
    faster = [
        [seconds * share for seconds, share in zip(times, shares[number::3], strict=True)]
        for number, times in enumerate((centre, first, second))
    ]
    before, after = choice_of(centre, first, second).candidate, choice_of(*faster).candidate
    assert faster[0][CANDIDATES.index(after)] <= WITHIN_ERROR * centre[CANDIDATES.index(before)]


def test_what_hides_behind_arithmetic_is_part_of_the_spread() -> None:
    """It is fitted on a run or two, so the ends lie on both sides of it."""
    overlapping = [software for software in SOFTWARE.values() if software.overlaps is not None]
    assert overlapping
    for software in overlapping:
        fast, slow = software.extremes
        assert slow.overlap < software.overlap < fast.overlap
        assert slow.exchange_overlap < software.exchange_overlap < fast.exchange_overlap
        assert slow.tensor_overlap <= software.tensor_overlap <= fast.tensor_overlap
