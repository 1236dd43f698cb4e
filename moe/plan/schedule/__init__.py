"""Pipeline schedules: the order in which each pipeline rank runs its stages on the micro-batches of a step.

Pure functions of sizes. `schedule` returns the order, `simulate` its timing, `bubble_s` the closed form for equal
stages, and `micro_batches_problem` says when there are too few micro-batches.
"""

from moe.plan.schedule.action import Action, ActionKind
from moe.plan.schedule.bubble import bubble_s
from moe.plan.schedule.by_name import can_pair_passes, rank_of_stage, schedule, splits_backward, stages_of_rank
from moe.plan.schedule.in_flight import activations_bound, peak_activations
from moe.plan.schedule.problems import micro_batches_problem, min_micro_batches
from moe.plan.schedule.simulation import Simulation, StageSeconds, simulate
from moe.plan.schedule.turns import Turn, schedule_turns

__all__ = [
    "Action", "ActionKind", "Simulation", "StageSeconds", "Turn", "activations_bound", "bubble_s", "can_pair_passes",
    "min_micro_batches", "micro_batches_problem", "peak_activations", "rank_of_stage", "schedule", "schedule_turns",
    "simulate", "splits_backward", "stages_of_rank",
]  # fmt: skip
