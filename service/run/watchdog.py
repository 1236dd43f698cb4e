"""Judgement of a worker group by its heartbeats: who is frozen, who waits for whom, and whether all are stuck.

Pure: from what the ranks said last to what is to be done. A rank that does not beat is looked at from outside. One
that beats and does nothing, while others wait for it, is named, and its stacks are asked for; it is ended only when
nobody in its group has worked for longer than any honest wait. A slow rank works, and is left alone for as long as it
does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_SHOWN = 8
"""Ranks that a reason names."""
_PATIENT = ("checkpoint", "loading")
_UNWATCHED = ("start", "preparation")
"""In these a rank may wait for a process of another job, which prepares the same corpus."""


@dataclass(frozen=True)
class Limits:
    """Seconds after which something is done."""

    silent_s: float = 20.0
    """A rank that has not beaten for so long is looked at."""
    idle_s: float = 20.0
    """A rank that has done nothing for so long, while others wait for it, is named."""
    stuck_s: float = 300.0
    """A group in which nobody has done anything for so long is stuck."""
    slowest_steps: int = 20
    """It has this many times as long as its last step took, if that is more."""
    storage_s: float = 1800.0
    """It has so long while a rank reads or writes a checkpoint: storage may take its time, and neither CPU time nor
    files tell of what is on its way to it."""


@dataclass(frozen=True)
class RankFacts:
    """What a rank said last, and how long ago."""

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
    """What is to be done about a group; all empty where it gets on."""

    silent: tuple[int, ...] = ()
    """Ranks to be looked at: no heartbeat for `Limits.silent_s`."""
    idle: tuple[int, ...] = ()
    """Ranks whose stacks are to be asked for: they beat, and do nothing."""
    stuck: tuple[int, ...] = ()
    """Ranks to be ended: the group gets nowhere because of them."""
    reason: str = ""
    """Why, for `stuck`."""


def judge(ranks: Sequence[RankFacts], limits: Limits) -> Judgement:
    """Judge a group by its ranks, all of those whose processes are there."""
    silent = [rank for rank in ranks if rank.silent_s >= limits.silent_s]
    watched = [rank for rank in ranks if rank not in silent and rank.phase not in _UNWATCHED]
    outside = [rank for rank in watched if not rank.in_collective]
    if outside or all(rank.idle_s >= limits.idle_s for rank in watched):
        idle = [rank for rank in outside or watched if rank.idle_s >= limits.idle_s]
    else:
        idle = []  # all wait in collectives, and what they wait for goes on
    numbers = tuple(rank.rank for rank in silent), tuple(rank.rank for rank in idle)
    return Judgement(*numbers, *_stuck(ranks, limits))


def _stuck(ranks: Sequence[RankFacts], limits: Limits) -> tuple[tuple[int, ...], str]:
    """(ranks to be ended, why) of a group in which nobody has done anything for too long."""
    still_s = min((max(rank.idle_s, rank.silent_s) for rank in ranks), default=0.0)
    if still_s < _patience_s(ranks, limits) or any(rank.phase in _UNWATCHED for rank in ranks):
        return (), ""
    to_blame = [rank for rank in ranks if not rank.in_collective] or list(ranks)
    shown = ", ".join(map(str, to_blame[:MAX_SHOWN])) + (" and others" if len(to_blame) > MAX_SHOWN else "")
    return tuple(rank.rank for rank in to_blame), f"no rank has done anything for {still_s:.0f} s; {shown}"


def _patience_s(ranks: Sequence[RankFacts], limits: Limits) -> float:
    slowest_s = limits.slowest_steps * max((rank.step_s for rank in ranks), default=0.0)
    storage_s = limits.storage_s if any(rank.phase in _PATIENT for rank in ranks) else 0.0
    return max(limits.stuck_s, slowest_s, storage_s)
