"""Goals that the number of workers, and the pool, are chosen by."""

from typing import Literal, get_args

from moe.plan.plan import Plan

Goal = Literal["time", "cost"]
"""The fastest step, or the one of the least device-seconds, times the price where that is known. Devices count as they
are paid: whole nodes, unless they are rented singly."""
GOALS: tuple[Goal, ...] = get_args(Goal)


def effort(goal: Goal, billed_devices: int, step_s: float, price_per_hour: float | None = None) -> float:
    """Amount that the goal wants little of, to six digits, as times are told: seconds of a step, or its device-seconds,
    times the price where there is one."""
    if goal == "time":
        return float(f"{step_s:.6g}")
    return float(f"{billed_devices * step_s * (price_per_hour or 1.0):.6g}")


def order(goal: Goal, plan: Plan, price_per_hour: float | None = None) -> tuple[bool, float, int]:
    """Key that puts the best plan first: those that can be run, the least effort, the fewest workers."""
    of = effort(goal, plan.billed_devices, plan.predicted.step_s, price_per_hour)
    return bool(plan.not_yet), of, plan.num_workers
