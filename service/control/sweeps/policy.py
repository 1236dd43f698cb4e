"""Decisions about a sweep: a pure function from facts about its members to one decision.

Halving is synchronous: a rung is decided once every member that reached it has a value or is over. So a sweep's choices
depend on values alone, never on the order in which jobs finish.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from service.control.sweeps.states import SweepState
from service.wire.states import ACTIVE, OVER, State


@dataclass(frozen=True)
class MemberFacts:
    """One member of a sweep."""

    number: int
    name: str
    state: State
    """State of its job; DELETING for one that is deleted."""
    held: bool = False
    """Whether it waits for the sweep to start it."""
    rung: int = 0
    """Rungs that it survived."""
    is_out: bool = False
    """Whether it was not among the best of its rung."""
    is_at_rung: bool = False
    """Whether its run has paused at the step of its rung."""
    is_cancelling: bool = False
    value: float | None = None
    """Last value of the metric; None without one."""

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def holds_slot(self) -> bool:
        """Whether it is queued, or may hold resources of the cluster."""
        return self.state in ACTIVE or (self.state == State.QUEUED and not self.held)


@dataclass(frozen=True)
class SweepFacts:
    members: tuple[MemberFacts, ...]
    metric: str
    mode: Literal["min", "max"]
    max_parallel: int | None = None
    rungs: tuple[int, ...] = ()
    """Steps at which the best are chosen."""
    factor: int = 2
    is_cancelled: bool = False


@dataclass(frozen=True)
class Wait:
    """Do nothing now, for a reason."""

    reason: str


@dataclass(frozen=True)
class Start:
    """Let members enter the queue."""

    numbers: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Choose:
    """Continue the best members of a rung, and stop the others, also those that have ended already."""

    rung: int
    step: int
    continues: tuple[int, ...]
    """Best first."""
    stops: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class CancelMembers:
    """Cancel members of a sweep that a user cancelled."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class EndSweep:
    state: SweepState
    reason: str


SweepDecision = Wait | Start | Choose | CancelMembers | EndSweep


def decide(sweep: SweepFacts) -> SweepDecision:
    """Next step of a running sweep."""
    if sweep.is_cancelled:
        return _cancel(sweep)
    rung = min((member.rung for member in _contenders(sweep)), default=len(sweep.rungs))
    if rung < len(sweep.rungs):
        decision = _choose(sweep, rung)
        if decision is not None:
            return decision
    unfinished = [member for member in sweep.members if not member.is_over]
    if not unfinished:
        return _end(sweep)
    return _start(sweep) or Wait(_waiting_reason(sweep, unfinished))


def num_continuing(num_entered: int, factor: int) -> int:
    """Number of members that continue from a rung that `num_entered` members reached."""
    return max(1, num_entered // factor)


def _contenders(sweep: SweepFacts) -> list[MemberFacts]:
    """Members that may still be chosen at a rung."""
    return [
        member
        for member in sweep.members
        if not member.is_out and (not member.is_over or member.state == State.SUCCEEDED)
    ]


def _choose(sweep: SweepFacts, rung: int) -> Choose | EndSweep | None:
    """Choice at a rung; None until all members have reached it or ended."""
    entrants = [member for member in sweep.members if member.rung == rung and not member.is_out]
    contenders = [member for member in entrants if member.is_at_rung or member.state == State.SUCCEEDED]
    if any(member not in contenders and not member.is_over for member in entrants):
        return None
    ranking = sorted((member for member in contenders if _rank(sweep, member) < math.inf),
                     key=lambda member: (_rank(sweep, member), member.number))  # fmt: skip
    step = sweep.rungs[rung]
    if not ranking:
        if all(member.is_over for member in contenders):
            return None
        return EndSweep(SweepState.FAILED, f"no member has a value of {sweep.metric} at step {step}: nothing to choose "
                        "by; its members stay paused, and can be resumed one by one")  # fmt: skip
    keep = num_continuing(len(entrants), sweep.factor)
    best, others = ranking[:keep], [member for member in entrants if member not in ranking[:keep]]
    num_ended = len(entrants) - len(contenders)
    reason = (
        f"rung {rung + 1} at step {step}: {len(best)} of {len(entrants)} go on, the best with {sweep.metric} "
        f"{_text(best[0].value)}, the last with {_text(best[-1].value)}"
        + (f"; {num_ended} had ended before" if num_ended else "")
    )
    numbers = tuple(member.number for member in best), tuple(member.number for member in others)
    return Choose(rung, step, *numbers, reason)


def _rank(sweep: SweepFacts, member: MemberFacts) -> float:
    """Value to rank by, lower is better; infinite without a value."""
    if member.value is None or math.isnan(member.value):
        return math.inf
    return member.value if sweep.mode == "min" else -member.value


def _start(sweep: SweepFacts) -> Start | None:
    waiting = [member for member in sweep.members if member.held and member.state == State.QUEUED]
    num_running = sum(member.holds_slot for member in sweep.members)
    room = len(waiting) if sweep.max_parallel is None else max(0, sweep.max_parallel - num_running)
    numbers = tuple(member.number for member in waiting[:room])
    limit = "" if sweep.max_parallel is None else f", at most {sweep.max_parallel} at a time"
    return Start(numbers, f"started by its sweep{limit}") if numbers else None


def _cancel(sweep: SweepFacts) -> SweepDecision:
    unfinished = [member for member in sweep.members if not member.is_over]
    if numbers := tuple(member.number for member in unfinished if not member.is_cancelling):
        return CancelMembers(numbers)
    if unfinished:
        return Wait(f"cancelling {_names(unfinished)}")
    return EndSweep(SweepState.CANCELLED, "cancelled")


def _end(sweep: SweepFacts) -> EndSweep:
    succeeded = [member for member in sweep.members if member.state == State.SUCCEEDED]
    if not succeeded:
        return EndSweep(SweepState.FAILED, "no member succeeded")
    ranked = [member for member in succeeded if _rank(sweep, member) < math.inf]
    if not ranked:
        return EndSweep(
            SweepState.SUCCEEDED, f"{len(succeeded)} members succeeded, none with a value of {sweep.metric}"
        )
    best = min(ranked, key=lambda member: (-member.rung, _rank(sweep, member), member.number))
    return EndSweep(SweepState.SUCCEEDED, f"best: {best.name} with {sweep.metric} {_text(best.value)}")


def _waiting_reason(sweep: SweepFacts, unfinished: Sequence[MemberFacts]) -> str:
    paused = [
        member for member in unfinished if member.state in (State.PAUSED, State.PAUSING) and not member.is_at_rung
    ]
    running = sum(member.holds_slot for member in unfinished)
    if paused and not running:
        return f"waiting for {_names(paused)}, paused by a user: resume or cancel"
    num_held = sum(member.held and member.state == State.QUEUED for member in unfinished)
    return f"{running} queued or running" + (f", {num_held} to start" if num_held else "")


def _names(members: Sequence[MemberFacts], limit: int = 3) -> str:
    names = ", ".join(member.name for member in members[:limit])
    return names + (f" and {len(members) - limit} more" if len(members) > limit else "")


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
