"""Plan query: the number of workers, and how plans are priced, chosen and listed."""

from dataclasses import dataclass

from moe.plan.goal import Goal
from moe.plan.profile import ProfileName
from moe.plan.software import SoftwareName


@dataclass(frozen=True)
class PlanQuery:
    """Parameters of a plan beside the job and its cluster."""

    num_workers: int | None = None
    """By default the most of the job's range that there are devices for, or the goal's choice."""
    top: int = 5
    """Layouts to report, the chosen one included."""
    profile: ProfileName | None = None
    """Executor to price for: `ours` (default), `peer` (Megatron-Core) or `torchtitan`."""
    software: SoftwareName | None = None
    """Source of host times and sustained rates; by default `ours-eager`, or `megatron-eager` for a peer."""
    goal: Goal | None = None
    """Chooses the number of workers within the job's range, and the pool. By default the most workers that there are
    devices for, and the fastest pool."""
    load_skew: float | None = None
    """Measured rows of the busiest expert over the mean."""
    to_run: bool = False
    """Whether to search runnable layouts only."""
