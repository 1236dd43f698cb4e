"""Judgement of a worker group by its heartbeats: which ranks are silent or idle, and whether the group is stuck.

A pure function of the ranks' last heartbeats. A rank that sends none is examined from outside. One that sends them but
is idle while others wait for it is reported, with its stacks; it is ended only when no rank of its group has worked
for longer than any legitimate wait. A slow rank works, and is left alone for as long as it does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_SHOWN = 8
"""Ranks that a reason names."""
_PATIENT = ("checkpoint", "loading")
_UNWATCHED = ("start", "preparation")
"""Phases in which a rank may wait for a process of another job that prepares the same corpus."""


@dataclass(frozen=True)
class WatchdogLimits:
    """Seconds after which the driver acts."""

    silent_s: float = 20.0
    """Silence after which a rank is examined."""
    idle_s: float = 20.0
    """Idle time after which a rank that others wait for is reported."""
    stuck_s: float = 300.0
    """Idle time of all ranks after which a group is stuck."""
    slowest_steps: int = 20
    """A group is not stuck within this many times the duration of its last step."""
    storage_s: float = 1800.0
    """Idle time allowed while a rank reads or writes a checkpoint: storage may be slow, and what is on its way there
    shows neither as CPU time nor as I/O."""


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
    """Ranks of a group to act on; all empty while it makes progress."""

    silent: tuple[int, ...] = ()
    """Ranks to examine: no heartbeat for `WatchdogLimits.silent_s`."""
    idle: tuple[int, ...] = ()
    """Ranks to ask for their stacks: they send heartbeats and are idle."""
    stuck: tuple[int, ...] = ()
    """Ranks to end unless an examination finds them working: the group makes no progress because of them."""
    reason: str = ""
    """Why, for `stuck`."""


def judge(ranks: Sequence[RankFacts], limits: WatchdogLimits) -> Judgement:
    """Judge a group by the last heartbeats of all its connected ranks."""
    silent = [rank for rank in ranks if rank.silent_s >= limits.silent_s]
    watched_ranks = [rank for rank in ranks if rank not in silent and rank.phase not in _UNWATCHED]
    outside = [rank for rank in watched_ranks if not rank.in_collective]
    if outside or all(rank.idle_s >= limits.idle_s for rank in watched_ranks):
        idle = [rank for rank in outside or watched_ranks if rank.idle_s >= limits.idle_s]
    else:
        idle = []  # all wait in collectives, and what they wait for goes on
    numbers = tuple(rank.rank for rank in silent), tuple(rank.rank for rank in idle)
    return Judgement(*numbers, *_find_stuck_ranks(ranks, limits))


def _find_stuck_ranks(ranks: Sequence[RankFacts], limits: WatchdogLimits) -> tuple[tuple[int, ...], str]:
    """(ranks to end, reason) of a group in which no rank has worked for too long."""
    still_s = min((max(rank.idle_s, rank.silent_s) for rank in ranks), default=0.0)
    if still_s < _patience_s(ranks, limits) or any(rank.phase in _UNWATCHED for rank in ranks):
        return (), ""
    to_blame = [rank for rank in ranks if not rank.in_collective] or list(ranks)
    names = ", ".join(map(str, to_blame[:MAX_SHOWN])) + (" and others" if len(to_blame) > MAX_SHOWN else "")
    return tuple(rank.rank for rank in to_blame), f"no rank has done anything for {still_s:.0f} s; {names}"


def _patience_s(ranks: Sequence[RankFacts], limits: WatchdogLimits) -> float:
    slowest_s = limits.slowest_steps * max((rank.step_s for rank in ranks), default=0.0)
    storage_s = limits.storage_s if any(rank.phase in _PATIENT for rank in ranks) else 0.0
    return max(limits.stuck_s, slowest_s, storage_s)
