"""Pipeline schedules: the order in which each pipeline rank runs its stages on the micro-batches of a step.

Pure functions of sizes. `schedule` returns the order, `simulate` its timing, `bubble_s` the closed form for equal
stages, and `schedule_problems` says which sizes a schedule refuses.
"""

from moe.plan.schedule.action import Action, ActionKind
from moe.plan.schedule.bubble import bubble_s
from moe.plan.schedule.by_name import SCHEDULES, ScheduleName, rank_of_stage, schedule, stages_of_rank
from moe.plan.schedule.in_flight import activations_bound, most_activations
from moe.plan.schedule.problems import least_micro_batches, schedule_problems
from moe.plan.schedule.simulation import Simulation, StageSeconds, simulate

__all__ = [
    "SCHEDULES", "Action", "ActionKind", "ScheduleName", "Simulation", "StageSeconds", "activations_bound", "bubble_s",
    "least_micro_batches", "most_activations", "rank_of_stage", "schedule", "schedule_problems", "simulate",
    "stages_of_rank",
]  # fmt: skip
