from hypothesis import given
from hypothesis import strategies as st

from service.tracker.step_ranges import StepRanges

STEPS = st.integers(0, 12)


@given(st.none() | STEPS, st.lists(st.tuples(st.booleans(), STEPS), max_size=30))
def test_ranges_hold_what_a_set_holds(last_step: int | None, changes: list[tuple[bool, int]]) -> None:
    ranges, steps = StepRanges(last_step), set() if last_step is None else set(range(last_step + 1))
    for is_cut, step in changes:
        if is_cut:
            ranges.cut(step)
            steps = {other for other in steps if other < step}
        else:
            ranges.add(step)
            steps.add(step)
        assert {step for step in range(15) if step in ranges} == steps
