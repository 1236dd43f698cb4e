"""Goals that select the number of workers and the pool."""

from typing import Literal, get_args

from moe.plan.plan import Plan

Goal = Literal["time", "cost"]
"""`time`: shortest step. `cost`: fewest device-seconds, times the price if known. Devices count as billed: whole
nodes, unless rented singly."""
GOALS: tuple[Goal, ...] = get_args(Goal)


def effort(goal: Goal, billed_devices: int, step_s: float, price_per_hour: float | None = None) -> float:
    """Objective to minimize, rounded to six digits: step seconds, or device-seconds (times the price, if known)."""
    if goal == "time":
        return float(f"{step_s:.6g}")
    return float(f"{billed_devices * step_s * (price_per_hour or 1.0):.6g}")


def order(goal: Goal, plan: Plan, price_per_hour: float | None = None) -> tuple[bool, float, int]:
    """Sort key: runnable plans first, then the lowest objective, then the fewest workers."""
    of = effort(goal, plan.billed_devices, plan.predicted.step_s, price_per_hour)
    return bool(plan.not_yet), of, plan.num_workers
