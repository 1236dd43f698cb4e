"""Activations in flight: those of a stage's forward pass that await the gradients computed from them."""

from collections.abc import Mapping, Sequence
from typing import assert_never

from moe.plan.schedule.action import Action
from moe.spec.parallel import PipelineSchedule


def peak_activations(actions: Sequence[Action], amount_of_stage: Mapping[int, float] | None = None) -> float:
    """Most activations in flight at any time on a rank that runs `actions`.

    `amount_of_stage`: what one micro-batch's activations of each stage count, for example bytes; absent stages count
    nothing. By default all stages count 1.
    """
    peak = in_flight = 0.0
    for action in actions:
        amount = 1.0 if amount_of_stage is None else amount_of_stage.get(action.stage, 0.0)
        if action.kind == "forward":
            in_flight += amount
            peak = max(peak, in_flight)
        elif action.completes_backward:
            in_flight -= amount
    return peak


def activations_bound(
    name: PipelineSchedule, rank: int, num_ranks: int, virtual_stages: int, num_micro_batches: int
) -> int:
    """Most activations in flight that a schedule promises on a rank, where each virtual stage's count 1."""
    peak = num_micro_batches * virtual_stages
    match name:
        case "gpipe":
            return peak
        case "1f1b":
            return min(peak, num_ranks - rank)
        case "interleaved":
            return min(peak, 2 * (num_ranks - rank - 1) + (virtual_stages - 1) * num_ranks + 1)
        case "zero_bubble":
            return min(peak, num_ranks)
        case "zb_v":
            return min(peak, 2 * num_ranks)
        case _:
            assert_never(name)
