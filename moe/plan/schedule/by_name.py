"""Schedules by name."""

from typing import assert_never

from moe.plan.schedule.action import Order
from moe.plan.schedule.gpipe import gpipe
from moe.plan.schedule.interleaved import interleaved
from moe.plan.schedule.one_f_one_b import one_f_one_b
from moe.plan.schedule.zb_v import zb_v
from moe.plan.schedule.zero_bubble import zero_bubble
from moe.spec.parallel import PipelineSchedule


def schedule(
    name: PipelineSchedule, num_ranks: int, virtual_stages: int, num_micro_batches: int, *, ahead: int = 0
) -> tuple[Order, ...]:
    """Return the actions of each pipeline rank, in order, for one step.

    Any number of micro-batches from 1 can be run, though `micro_batches_problem` refuses those with which some rank
    always waits. `ParallelSpec` refuses virtual stages that a schedule does not have. `ahead`: forward passes that
    every rank runs, and whose activations it keeps, before it has to; for schedules that `can_pair_passes` accepts.
    """
    assert ahead == 0 or can_pair_passes(name, num_ranks)
    return tuple(_order(name, rank, num_ranks, virtual_stages, num_micro_batches, ahead) for rank in range(num_ranks))


def can_pair_passes(name: PipelineSchedule, num_ranks: int) -> bool:
    """Whether forward and backward passes can take place side by side: in interleaved 1F1B, as in Megatron-Core, and
    without a pipeline."""
    return name == "interleaved" or num_ranks == 1


def _order(
    name: PipelineSchedule, rank: int, num_ranks: int, virtual_stages: int, num_micro_batches: int, ahead: int
) -> Order:
    match name:
        case "gpipe":
            return gpipe(rank, num_micro_batches)
        case "1f1b":
            return one_f_one_b(rank, num_ranks, num_micro_batches, ahead)
        case "interleaved":
            return interleaved(rank, num_ranks, virtual_stages, num_micro_batches, ahead)
        case "zero_bubble":
            return zero_bubble(rank, num_ranks, num_micro_batches)
        case "zb_v":
            return zb_v(rank, num_ranks, num_micro_batches)
        case _:
            assert_never(name)


def rank_of_stage(name: PipelineSchedule, stage: int, num_ranks: int, virtual_stages: int) -> int:
    """Return the pipeline rank of a stage: stages go round the ranks, or down and up again in a V."""
    assert 0 <= stage < num_ranks * virtual_stages
    if name == "zb_v" and stage >= num_ranks:
        return 2 * num_ranks - 1 - stage
    return stage % num_ranks


def stages_of_rank(name: PipelineSchedule, rank: int, num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the stages of a pipeline rank, in model order."""
    return tuple(
        stage
        for stage in range(num_ranks * virtual_stages)
        if rank_of_stage(name, stage, num_ranks, virtual_stages) == rank
    )


def splits_backward(name: PipelineSchedule) -> bool:
    """Whether a schedule computes gradients of weights apart from those of inputs."""
    return name in ("zero_bubble", "zb_v")
