"""Plan query: the number of workers, and how plans are priced, chosen and listed; goals."""

from dataclasses import dataclass
from typing import Literal, get_args

from moe.plan.plan import Plan
from moe.plan.profile import ProfileName
from moe.plan.software import SoftwareName

Goal = Literal["time", "cost"]
"""`time`: shortest step. `cost`: fewest device-seconds, times the price if known. Devices count as billed: whole
nodes, unless rented singly."""
GOALS: tuple[Goal, ...] = get_args(Goal)


def evaluate_objective(goal: Goal, billed_devices: int, step_s: float, price_per_hour: float | None = None) -> float:
    """Objective to minimize, rounded to six digits: step seconds, or device-seconds (times the price, if known)."""
    if goal == "time":
        return float(f"{step_s:.6g}")
    return float(f"{billed_devices * step_s * (price_per_hour or 1.0):.6g}")


def plan_sort_key(goal: Goal, plan: Plan, price_per_hour: float | None = None) -> tuple[bool, float, int]:
    """Sort key: runnable plans first, then the lowest objective, then the fewest workers."""
    objective = evaluate_objective(goal, plan.billed_devices, plan.predicted.step_s, price_per_hour)
    return bool(plan.not_yet), objective, plan.num_workers


@dataclass(frozen=True)
class PlanQuery:
    """Parameters of a plan in addition to the job and its cluster."""

    num_workers: int | None = None
    """By default the most workers of the job's range that have devices, or the goal's choice."""
    top: int = 5
    """Layouts to report, the chosen one included."""
    profile: ProfileName | None = None
    """Executor to price for: `ours` (default), `peer` (Megatron-Core) or `torchtitan`."""
    software: SoftwareName | None = None
    """Source of host times and sustained rates; by default `ours-eager`, or `megatron-eager` for a peer."""
    goal: Goal | None = None
    """Chooses the number of workers within the job's range, and the pool. By default the most workers that have
    devices, and the fastest pool."""
    load_skew: float | None = None
    """Measured rows of the busiest expert over the mean."""
    to_run: bool = False
    """Whether to search runnable layouts only."""
