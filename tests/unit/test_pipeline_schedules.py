"""Pipeline schedules: every action once, no deadlock, bounded activations, and the papers' bubbles."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.plan.candidate import SCHEDULES
from moe.plan.schedule import (
    Action,
    StageSeconds,
    Turn,
    activations_bound,
    bubble_s,
    micro_batches_problem,
    min_micro_batches,
    peak_activations,
    rank_of_stage,
    schedule,
    schedule_turns,
    simulate,
    splits_backward,
    stages_of_rank,
)
from moe.spec.parallel import PipelineSchedule

Size = tuple[PipelineSchedule, int, int, int]
"""Schedule, ranks, virtual stages per rank, micro-batches."""


@st.composite
def sizes(draw: st.DrawFn, max_micro_batches: int = 40) -> Size:
    """A schedule, ranks, virtual stages that it has, and any number of micro-batches."""
    name = draw(st.sampled_from(SCHEDULES))
    virtual_stages = {"interleaved": draw(st.integers(2, 4)), "zb_v": 2}.get(name, 1)
    return name, draw(st.integers(1, 8)), virtual_stages, draw(st.integers(1, max_micro_batches))


def durations(most: int = 9) -> st.SearchStrategy[StageSeconds]:
    return st.builds(StageSeconds, st.integers(1, most), st.integers(1, most), st.integers(1, most))


@given(sizes())
def test_each_stage_passes_each_micro_batch_once_on_its_rank(size: Size) -> None:
    name, num_ranks, virtual_stages, num_micro_batches = size
    kinds = ("forward", "backward_input", "backward_weight") if splits_backward(name) else ("forward", "backward")
    orders = schedule(*size)
    assert len(orders) == num_ranks
    for rank, order in enumerate(orders):
        stages = stages_of_rank(name, rank, num_ranks, virtual_stages)
        assert len(stages) == virtual_stages
        assert all(rank_of_stage(name, stage, num_ranks, virtual_stages) == rank for stage in stages)
        assert Counter(order) == Counter(
            Action(kind, stage, micro_batch)
            for kind in kinds
            for stage in stages
            for micro_batch in range(num_micro_batches)
        )


@given(sizes(), durations(), st.integers(0, 3))
def test_schedules_run_without_deadlock_and_inputs_come_first(size: Size, seconds: StageSeconds, hop_s: int) -> None:
    name, num_ranks, virtual_stages, _ = size
    num_stages, orders = num_ranks * virtual_stages, schedule(*size)
    start_s = simulate(orders, [seconds] * num_stages, hop_s).start_s
    assert len(start_s) == sum(map(len, orders))
    for later, earlier in dependencies(start_s, num_stages):
        ranks = {rank_of_stage(name, action.stage, num_ranks, virtual_stages) for action in (later, earlier)}
        assert start_s[later] >= start_s[earlier] + seconds.of(earlier.kind) + hop_s * (len(ranks) - 1)
    for order in orders:
        for first, second in pairwise(order):
            assert start_s[second] >= start_s[first] + seconds.of(first.kind)


def dependencies(actions: Iterable[Action], num_stages: int) -> Iterator[tuple[Action, Action]]:
    """Pairs of an action and one that it needs, written out by kind."""
    actions = tuple(actions)
    split = any(action.kind == "backward_input" for action in actions)
    backward = "backward_input" if split else "backward"
    for kind, stage, micro_batch in actions:
        action = Action(kind, stage, micro_batch)
        if kind == "forward" and stage:
            yield action, Action("forward", stage - 1, micro_batch)
        if kind == backward:
            yield action, Action("forward", stage, micro_batch)
        if kind == backward and stage < num_stages - 1:
            yield action, Action(backward, stage + 1, micro_batch)
        if kind == "backward_weight":
            yield action, Action("backward_input", stage, micro_batch)


@given(sizes())
def test_activations_in_flight_stay_within_the_promise_and_reach_it(size: Size) -> None:
    name, num_ranks, virtual_stages, num_micro_batches = size
    for rank, order in enumerate(schedule(*size)):
        bound = activations_bound(name, rank, num_ranks, virtual_stages, num_micro_batches)
        most = peak_activations(order)
        assert most <= bound
        if num_micro_batches >= 2 * num_ranks and num_micro_batches % num_ranks == 0:
            assert most == bound


@given(st.integers(1, 8), st.integers(1, 40))
def test_zero_bubble_keeps_no_more_than_the_first_rank_of_1f1b(num_ranks: int, num_micro_batches: int) -> None:
    most = peak_activations(schedule("1f1b", num_ranks, 1, num_micro_batches)[0])
    for order in schedule("zero_bubble", num_ranks, 1, num_micro_batches):
        assert peak_activations(order) <= most
    for order in schedule("zb_v", num_ranks, 2, num_micro_batches):  # stages of half the size
        assert peak_activations(order) / 2 <= most or num_micro_batches < num_ranks


def test_activations_in_flight_can_be_bytes() -> None:
    actions = [Action("forward", 0, 0), Action("forward", 3, 0), Action("backward", 3, 0), Action("backward", 0, 0)]
    assert peak_activations(actions, {0: 10, 3: 7}) == 17
    assert peak_activations(actions, {3: 7}) == 7


@given(sizes(max_micro_batches=24), durations())
def test_bubbles_of_equal_stages_are_those_of_the_papers(size: Size, seconds: StageSeconds) -> None:
    name, num_ranks, virtual_stages, num_micro_batches = size
    makespan_s = simulate(schedule(*size), [seconds] * (num_ranks * virtual_stages)).makespan_s
    busy_s = num_micro_batches * virtual_stages * (seconds.of("forward") + seconds.of("backward"))
    bound = bubble_s(name, num_ranks, seconds)
    if num_micro_batches >= min_micro_batches(name, num_ranks):
        assert makespan_s - busy_s >= bound
    whole = num_micro_batches % num_ranks == 0 or name != "interleaved"
    longest = max(seconds.forward, seconds.backward_weight) <= seconds.backward_input or not splits_backward(name)
    if whole and longest and num_micro_batches >= min_micro_batches(name, num_ranks):
        assert makespan_s - busy_s == bound


@pytest.mark.parametrize(
    ("name", "virtual_stages", "bubble"),
    [("gpipe", 1, 3 * 6), ("1f1b", 1, 3 * 6), ("interleaved", 2, 3 * 3), ("zero_bubble", 1, 3 * 2), ("zb_v", 2, 3 * 1)],
)
def test_the_bubbles_of_four_ranks(name: PipelineSchedule, virtual_stages: int, bubble: int) -> None:
    """A rank's passes take 2 s each, its virtual stages' a part: the figures of arXiv 2401.10241."""
    seconds = StageSeconds(*[2 / virtual_stages] * 3)
    simulation = simulate(schedule(name, 4, virtual_stages, 8), [seconds] * 4 * virtual_stages)
    assert simulation.makespan_s - 8 * 6 == bubble
    assert simulation.idle_shares == pytest.approx([bubble / simulation.makespan_s] * 4)


def test_a_slow_stage_and_slow_hops_lengthen_a_step() -> None:
    orders, even = schedule("1f1b", 2, 1, 2), StageSeconds(1, 1, 1)
    slow = StageSeconds(2, 2, 2)
    assert simulate(orders, [even, even]).makespan_s == 9
    # F0 at 0-1, on the slow stage from 1: F0 B0 F1 B1 to 13, and the last backward pass of the first stage.
    simulation = simulate(orders, [even, slow])
    assert simulation.makespan_s == 15
    assert simulation.idle_shares == pytest.approx((9 / 15, 3 / 15))
    assert simulation.peak_in_flight == (2, 1)
    assert simulate(orders, [even, even], hop_s=0.5).makespan_s == 10


def test_an_impossible_order_is_a_deadlock() -> None:
    first, second = schedule("1f1b", 2, 1, 1)
    with pytest.raises(ValueError, match="backward of stage 0, micro-batch 0"):
        simulate([tuple(reversed(first)), second], [StageSeconds(1, 1, 1)] * 2)


@pytest.mark.parametrize(
    ("name", "least"), [("gpipe", 1), ("1f1b", 4), ("interleaved", 4), ("zero_bubble", 4), ("zb_v", 7)]
)
def test_too_few_micro_batches_are_refused(name: PipelineSchedule, least: int) -> None:
    assert micro_batches_problem(name, 4, least) is None
    if least > 1:
        problem = micro_batches_problem(name, 4, least - 1)
        assert problem is not None
        assert (problem.code, problem.path, problem.value) == ("out_of_range", "parallel.schedule", name)
        assert str(least) in problem.rule
        assert "parallel.micro_batch_groups" in problem.remedy


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 24))
def test_turns_side_by_side_end_and_keep_one_more_stage(
    num_ranks: int, virtual_stages: int, num_micro_batches: int
) -> None:
    name: PipelineSchedule = "interleaved" if num_ranks > 1 else "1f1b"
    virtual_stages = max(2, virtual_stages) if num_ranks > 1 else 1
    sizes = num_ranks, virtual_stages, num_micro_batches
    turns = schedule_turns(name, *sizes, side_by_side=True)
    for rank, (own, order) in enumerate(zip(turns, schedule(name, *sizes), strict=True)):
        actions = [action for turn in own for action in turn]
        assert Counter(actions) == Counter(order)
        assert peak_activations(actions) <= activations_bound(name, rank, *sizes) + 1
        for turn in own:
            assert len(turn) == 1 or [action.kind for action in turn] == ["forward", "backward"]
            assert len({action.micro_batch for action in turn}) == len(turn)
        pairs = sum(len(turn) == 2 for turn in own)
        if num_micro_batches % num_ranks == 0:  # all but the passes of the warm-up
            warm_up = 2 * (num_ranks - rank - 1) + (virtual_stages - 1) * num_ranks + 1
            assert pairs == max(0, num_micro_batches * virtual_stages - warm_up)
    assert run_turns(turns, num_ranks * virtual_stages), "turns wait for one another"


def run_turns(turns: Sequence[Sequence[Turn]], num_stages: int) -> bool:
    """Whether all turns can be run, each only when what its actions need from others has been computed."""
    waiting, done, ran = [deque(own) for own in turns], set[Action](), True
    needs: dict[Action, set[Action]] = defaultdict(set)
    for action, earlier in dependencies([action for own in turns for turn in own for action in turn], num_stages):
        needs[action].add(earlier)
    while ran:
        ran = False
        for own in waiting:
            while own and all(needs[action] <= done for action in own[0]):
                done.update(own.popleft())
                ran = True
    return not any(waiting)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble", "zb_v"])
def test_other_schedules_have_no_room_for_two(name: PipelineSchedule) -> None:
    virtual_stages = 2 if name == "zb_v" else 1
    turns = schedule_turns(name, 2, virtual_stages, 8, side_by_side=True)
    assert [tuple(action for (action,) in own) for own in turns] == [*schedule(name, 2, virtual_stages, 8)]
