"""Status of a running attempt: each rank's last heartbeat."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

MAX_RANKS = 64
"""Most ranks in a status: those silent or idle longest."""
MAX_TEXT = 200


class _StatusMessage(BaseModel):
    # Sender and receiver may be of different releases: unknown fields are ignored.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class DeviceUse(_StatusMessage):
    """Use of one GPU."""

    utilization: float | None = None
    """Share of recent time in which a kernel ran, 0 to 1; None if unknown."""
    memory_bytes: int = 0
    """Memory in use by all processes."""
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
    """Seconds in that activity, at the heartbeat."""
    idle_s: float = 0.0
    """Seconds without CPU time, I/O or device use, at the heartbeat."""
    silent_s: float = 0.0
    """Age of the heartbeat when the driver reported it."""
    device: DeviceUse | None = None


class RunStatus(_StatusMessage):
    """Status of an attempt: its driver's process, and its ranks."""

    host: str = Field(default="", max_length=MAX_TEXT)
    pid: int = 0
    created_at: float = 0.0
    """Creation time of the driver's process; unique together with the pid."""
    num_ranks: int = Field(default=0, ge=0)
    ranks: tuple[RankStatus, ...] = Field(default=(), max_length=MAX_RANKS)


def select_ranks(ranks: Sequence[RankStatus]) -> tuple[RankStatus, ...]:
    """Ranks of a status, by number: all, or those silent or idle longest."""
    if len(ranks) > MAX_RANKS:
        ranks = sorted(ranks, key=lambda rank: (-rank.silent_s, -rank.idle_s, rank.rank))[:MAX_RANKS]
    return tuple(sorted(ranks, key=lambda rank: rank.rank))
