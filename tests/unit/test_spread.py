"""The choice between layouts under both ends of a software's spread: tables, and laws over random times."""

from hypothesis import given
from hypothesis import strategies as st

from moe.plan import Degrees
from moe.plan.candidate import Candidate
from moe.plan.search.spread import NEAR, Chosen, End, under_both

CANDIDATES = [Candidate(Degrees(data=2**power)) for power in range(4)]


def end(name: str, seconds: list[float]) -> End:
    times = dict(zip(CANDIDATES, seconds, strict=True))
    return End(name, times.__getitem__, min(CANDIDATES, key=lambda each: (times[each], each.degrees.data)))


def chosen(*seconds: list[float]) -> Chosen:
    ends = [end(f"end {number}", each) for number, each in enumerate(seconds)]
    return under_both(CANDIDATES[0], CANDIDATES, ends)


def test_the_fastest_between_the_ends_stays_where_it_is_near_the_best_at_both() -> None:
    assert chosen() == Chosen(CANDIDATES[0])
    assert chosen([1.01, 1, 2, 2], [1.0, 1.5, 2, 2]) == Chosen(CANDIDATES[0])


def test_another_one_that_is_near_the_best_at_both_takes_its_place() -> None:
    found = chosen([1.0, 1.01, 2, 2], [1.4, 1.01, 1.0, 2])
    assert found.candidate == CANDIDATES[1]
    assert found.reasons == (
        "within 2% of the fastest at both ends of the software's spread; expert 1 x data 1, micro-batches of 1, the "
        "fastest between them, is 40.0% "
        "behind with end 1",
    )


def test_ends_that_disagree_are_told() -> None:
    found = chosen([1.0, 1.5, 1.2, 2], [2.0, 1.0, 1.25, 3])
    assert found.candidate == CANDIDATES[2]
    assert found.reasons == (
        "the ends of the software's spread disagree, and no layout is within 2% at both: with end 0 expert 1 x data 1, "
        "micro-batches of 1 would take "
        "16.7% less; with end 1 expert 1 x data 2, micro-batches of 1 would take 20.0% less",
    )


SECONDS = st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4)


@given(SECONDS, SECONDS)
def test_a_layout_near_the_best_at_both_ends_is_chosen_wherever_there_is_one(
    first: list[float], second: list[float]
) -> None:
    ends = [end("a", first), end("b", second)]
    found = under_both(CANDIDATES[0], CANDIDATES, ends)

    def is_near(candidate: Candidate) -> bool:
        return all(each.regret(candidate) <= NEAR for each in ends)

    assert is_near(found.candidate) or not any(map(is_near, CANDIDATES))
    assert ("disagree" in "".join(found.reasons)) == (not is_near(found.candidate))
    assert bool(found.reasons) == (found.candidate != CANDIDATES[0] or not is_near(found.candidate))
