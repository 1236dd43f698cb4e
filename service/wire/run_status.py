"""Status of a running attempt as its driver knows it: each rank's last heartbeat. Only the newest is kept."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

MAX_RANKS = 64
"""Ranks that a status lists: those that were silent or idle longest come first."""
MAX_TEXT = 200


class _StatusMessage(BaseModel):
    # Ends of the wire may be of different releases, so that unknown fields are passed over.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class DeviceUse(_StatusMessage):
    """Use of one GPU."""

    utilization: float | None = None
    """Share of the last moments in which anything ran on it, 0 to 1; None where the driver does not say."""
    memory_bytes: int = 0
    """Memory in use, by this process and others."""
    memory_total_bytes: int = 0


class RankStatus(_StatusMessage):
    """Last heartbeat of a rank."""

    rank: int = Field(ge=0)
    host: str = Field(default="", max_length=MAX_TEXT)
    pid: int = 0
    phase: str = Field(default="", max_length=MAX_TEXT)
    """`moe.activity.Phase` of its training thread."""
    doing: str = Field(default="", max_length=MAX_TEXT)
    """Innermost activity of the rank, in words."""
    for_s: float = 0.0
    """Seconds in that activity when it said so."""
    idle_s: float = 0.0
    """Seconds without CPU time, files or device when it said so."""
    silent_s: float = 0.0
    """Age of the heartbeat when the driver reported it."""
    device: DeviceUse | None = None


class RunStatus(_StatusMessage):
    """Status of an attempt: the process that drives it, and its ranks."""

    host: str = Field(default="", max_length=MAX_TEXT)
    pid: int = 0
    created_at: float = 0.0
    """Time at which the driver's process was created, by its system's clock; with the pid it identifies the process."""
    num_ranks: int = Field(default=0, ge=0)
    """Ranks that are connected."""
    ranks: tuple[RankStatus, ...] = Field(default=(), max_length=MAX_RANKS)


def select_ranks(ranks: Sequence[RankStatus]) -> tuple[RankStatus, ...]:
    """The ranks that a status lists, by number: all, or those that were silent or idle longest."""
    if len(ranks) > MAX_RANKS:
        ranks = sorted(ranks, key=lambda rank: (-rank.silent_s, -rank.idle_s, rank.rank))[:MAX_RANKS]
    return tuple(sorted(ranks, key=lambda rank: rank.rank))
