"""Judgement of a worker group by its heartbeats: which ranks are silent or idle, and whether the group is stuck.

A pure function. Silent ranks are examined from outside. A rank that is idle while others wait for it is reported,
with its stacks; it is killed only when no rank has worked for longer than any legitimate wait. Slow ranks are left
alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_SHOWN = 8
"""Most ranks that a reason names."""
_PATIENT = ("checkpoint", "loading")
_UNWATCHED = ("start", "preparation")
"""Phases in which a rank may wait for another job that prepares the same corpus."""


@dataclass(frozen=True)
class WatchdogLimits:
    """Times after which the driver acts."""

    silent_s: float = 20.0
    """Silence after which a rank is examined."""
    idle_s: float = 20.0
    """Idle time after which a rank that others wait for is reported."""
    stuck_s: float = 300.0
    """Idle time of all ranks after which a group is stuck."""
    slowest_steps: int = 20
    """A group is not stuck within this multiple of its last step's duration."""
    storage_s: float = 1800.0
    """Idle time allowed at checkpoints: storage may be slow, and pending transfers show neither as CPU time nor as
    I/O."""


@dataclass(frozen=True)
class RankFacts:
    """Last heartbeat of a rank, and its age."""

    rank: int
    phase: str
    doing: str
    in_collective: bool
    silent_s: float
    idle_s: float
    step_s: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.doing})"


@dataclass(frozen=True)
class Judgement:
    """Ranks of a group to act on; empty while it makes progress."""

    silent: tuple[int, ...] = ()
    """Ranks to examine: no heartbeat for `WatchdogLimits.silent_s`."""
    idle: tuple[int, ...] = ()
    """Idle ranks that send heartbeats, to be asked for their stacks."""
    stuck: tuple[int, ...] = ()
    """Ranks that block their group, to be killed unless found working."""
    reason: str = ""
    """Reason for `stuck`."""


def judge(ranks: Sequence[RankFacts], limits: WatchdogLimits) -> Judgement:
    """Judge a group by the last heartbeats of all its connected ranks."""
    silent = [rank for rank in ranks if rank.silent_s >= limits.silent_s]
    watched_ranks = [rank for rank in ranks if rank not in silent and rank.phase not in _UNWATCHED]
    outside = [rank for rank in watched_ranks if not rank.in_collective]
    if outside or all(rank.idle_s >= limits.idle_s for rank in watched_ranks):
        idle = [rank for rank in outside or watched_ranks if rank.idle_s >= limits.idle_s]
    else:
        idle = []  # all wait in collectives, which make progress
    numbers = tuple(rank.rank for rank in silent), tuple(rank.rank for rank in idle)
    return Judgement(*numbers, *_find_stuck_ranks(ranks, limits))


def _find_stuck_ranks(ranks: Sequence[RankFacts], limits: WatchdogLimits) -> tuple[tuple[int, ...], str]:
    """(ranks to kill, reason) if no rank has worked for too long."""
    still_s = min((max(rank.idle_s, rank.silent_s) for rank in ranks), default=0.0)
    if still_s < _patience_s(ranks, limits) or any(rank.phase in _UNWATCHED for rank in ranks):
        return (), ""
    to_blame = [rank for rank in ranks if not rank.in_collective] or list(ranks)
    names = ", ".join(map(str, to_blame[:MAX_SHOWN])) + (" and others" if len(to_blame) > MAX_SHOWN else "")
    return tuple(rank.rank for rank in to_blame), f"all ranks idle for {still_s:.0f} s; {names}"


def _patience_s(ranks: Sequence[RankFacts], limits: WatchdogLimits) -> float:
    slowest_s = limits.slowest_steps * max((rank.step_s for rank in ranks), default=0.0)
    storage_s = limits.storage_s if any(rank.phase in _PATIENT for rank in ranks) else 0.0
    return max(limits.stuck_s, slowest_s, storage_s)
