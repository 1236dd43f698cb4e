"""Decisions about sweeps: tables of cases, and laws of whole sweeps simulated without any process."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control.sweeps.policy import (
    CancelMembers,
    Choose,
    EndSweep,
    MemberFacts,
    Start,
    SweepDecision,
    SweepFacts,
    Wait,
    decide,
)
from service.control.sweeps.states import SweepState
from service.wire.states import State

QUEUED, RUNNING, PAUSED = State.QUEUED, State.RUNNING, State.PAUSED
SUCCEEDED, FAILED, CANCELLED = State.SUCCEEDED, State.FAILED, State.CANCELLED


def member(number: int, state: State, **facts: object) -> MemberFacts:
    return MemberFacts(number, f"m{number}", state, **facts)  # type: ignore[arg-type]


def sweep(*members: MemberFacts, **facts: object) -> SweepFacts:
    return SweepFacts(members, "loss", **{"mode": "min", **facts})  # type: ignore[arg-type]


def at_rung(number: int, value: float | None, **facts: object) -> MemberFacts:
    return member(number, PAUSED, is_at_rung=True, value=value, **facts)


CASES: dict[str, tuple[SweepFacts, SweepDecision]] = {
    "all may start": (
        sweep(member(1, QUEUED, held=True), member(2, QUEUED, held=True)), Start((1, 2), "started by its sweep")
    ),
    "one place is taken": (
        sweep(member(1, RUNNING), member(2, QUEUED, held=True), member(3, QUEUED, held=True), max_parallel=2),
        Start((2,), "started by its sweep, at most 2 at a time"),
    ),
    "a member that was let into the queue takes a place": (
        sweep(member(1, QUEUED), member(2, QUEUED, held=True), max_parallel=1), Wait("1 queued or running, 1 to start")
    ),
    "paused by a user": (
        sweep(member(1, PAUSED), member(2, SUCCEEDED)), Wait("waiting for m1, paused by a user: resume or cancel")
    ),
    "one is on its way to the rung": (
        sweep(at_rung(1, 1.0), member(2, RUNNING), rungs=(5,)), Wait("1 queued or running")
    ),
    "the best third": (
        sweep(*(at_rung(number, 10.0 - number) for number in range(1, 7)), rungs=(5,), factor=3),
        Choose(0, 5, (6, 5), (1, 2, 3, 4),
               "rung 1 at step 5: 2 of 6 go on, the best with loss 4, the last with 5"),
    ),
    "higher is better": (
        sweep(at_rung(1, 1.0), at_rung(2, 2.0), rungs=(5,), mode="max"),
        Choose(0, 5, (2,), (1,), "rung 1 at step 5: 1 of 2 go on, the best with loss 2, the last with 2"),
    ),
    "equal values: the first": (
        sweep(at_rung(1, 2.0), at_rung(2, 2.0), rungs=(5,)),
        Choose(0, 5, (1,), (2,), "rung 1 at step 5: 1 of 2 go on, the best with loss 2, the last with 2"),
    ),
    "one without a value, one that failed": (
        sweep(at_rung(1, None), at_rung(2, 2.0), at_rung(3, 3.0), member(4, FAILED), rungs=(5,)),
        Choose(0, 5, (2, 3), (1, 4),
               "rung 1 at step 5: 2 of 4 go on, the best with loss 2, the last with 3; 1 had ended before"),
    ),
    "one that finished before the rung is compared too": (
        sweep(member(1, SUCCEEDED, value=1.0), at_rung(2, 2.0), rungs=(5,)),
        Choose(0, 5, (1,), (2,), "rung 1 at step 5: 1 of 2 go on, the best with loss 1, the last with 1"),
    ),
    "the second rung, of those that survived the first": (
        sweep(at_rung(1, 3.0, rung=1), at_rung(2, 2.0, rung=1), member(3, CANCELLED, is_out=True), rungs=(5, 10)),
        Choose(1, 10, (2,), (1,), "rung 2 at step 10: 1 of 2 go on, the best with loss 2, the last with 2"),
    ),
    "all failed before the rung": (
        sweep(member(1, FAILED), member(2, CANCELLED), rungs=(5,)), EndSweep(SweepState.FAILED, "no member succeeded")
    ),
    "cancelled": (
        sweep(member(1, RUNNING), member(2, QUEUED, held=True), member(3, SUCCEEDED), is_cancelled=True),
        CancelMembers((1, 2)),
    ),
    "being cancelled": (
        sweep(member(1, RUNNING, is_cancelling=True), member(2, CANCELLED), is_cancelled=True), Wait("cancelling m1")
    ),
    "cancelled altogether": (
        sweep(member(1, CANCELLED), member(2, State.DELETING), is_cancelled=True),
        EndSweep(SweepState.CANCELLED, "cancelled"),
    ),
    "all over": (
        sweep(member(1, SUCCEEDED, value=2.0), member(2, SUCCEEDED, value=1.0), member(3, FAILED, value=0.5)),
        EndSweep(SweepState.SUCCEEDED, "best: m2 with loss 1"),
    ),
    "the survivor of most rungs is the best": (
        sweep(member(1, SUCCEEDED, value=2.0, rung=1), member(2, SUCCEEDED, value=1.0, is_out=True), rungs=(5,)),
        EndSweep(SweepState.SUCCEEDED, "best: m1 with loss 2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_decisions(case: str) -> None:
    facts, decision = CASES[case]
    assert decide(facts) == decision


def test_a_rung_without_values_ends_the_sweep() -> None:
    decision = decide(sweep(at_rung(1, None), at_rung(2, None), rungs=(5,)))
    assert isinstance(decision, EndSweep)
    assert decision.state == SweepState.FAILED
    assert "loss" in decision.reason


STEPS = 1000


@given(
    losses=st.lists(st.floats(0, 10), min_size=2, max_size=20),
    failing=st.sets(st.integers(0, 19)),
    rungs=st.lists(st.integers(1, STEPS - 1), unique=True, max_size=4).map(sorted),
    factor=st.integers(2, 4),
    max_parallel=st.integers(1, 5),
    order=st.randoms(use_true_random=False),
)
def test_a_simulated_sweep_keeps_to_its_budget(
    losses: list[float], failing: set[int], rungs: list[int], factor: int, max_parallel: int, order: object
) -> None:
    """Whatever fails and in whatever order jobs finish: the sweep ends, never has more running than it may, never
    trains more steps than halving allows, and ends with the best of those that never failed."""
    members = [member(number, QUEUED, held=True) for number in range(1, len(losses) + 1)]
    done = dict.fromkeys(range(1, len(losses) + 1), 0)
    entered: list[int] = []
    facts = SweepFacts(tuple(members), "loss", "min", max_parallel, tuple(rungs), factor)
    for _ in range(10 * len(losses) * (len(rungs) + 2)):
        match decide(facts):
            case Start(numbers):
                members = [replace(m, held=False, state=RUNNING) if m.number in numbers else m for m in members]
            case Choose(rung, _, continues, stops):
                assert continues
                entered.append(len(continues) + len(stops))
                members = [
                    replace(m, rung=rung + 1, state=QUEUED, held=True, is_at_rung=False) if m.number in continues
                    else replace(m, is_out=True, state=CANCELLED if m.state == PAUSED else m.state, is_at_rung=False)
                    if m.number in stops else m
                    for m in members
                ]  # fmt: skip
            case EndSweep(state, reason):
                break
            case _:
                index = order.choice([i for i, m in enumerate(members) if m.state == RUNNING])  # type: ignore[attr-defined]
                runner = members[index]
                is_last = runner.rung == len(rungs)
                done[runner.number] = STEPS if is_last else rungs[runner.rung]
                if index in failing:
                    members[index] = replace(runner, state=FAILED)
                elif is_last:
                    members[index] = replace(runner, state=SUCCEEDED, value=losses[index])
                else:
                    members[index] = replace(runner, state=PAUSED, is_at_rung=True, value=losses[index])
        assert sum(m.holds_slot for m in members) <= max_parallel
        facts = replace(facts, members=tuple(members))
    else:
        pytest.fail("the sweep did not end")
    bounds, budget, left = [*rungs, STEPS], 0, len(losses)
    for begin, end in zip([0, *rungs], bounds, strict=True):
        budget += left * (end - begin)
        left = max(1, left // factor)
    assert sum(done.values()) <= budget
    healthy = [index for index in range(len(losses)) if index not in failing]
    assert state == (SweepState.SUCCEEDED if healthy else SweepState.FAILED)
    if healthy:
        best = min(healthy, key=lambda index: (losses[index], index))
        assert reason == f"best: m{best + 1} with loss {losses[best]:.4g}"
