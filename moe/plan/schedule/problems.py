"""Numbers of micro-batches that a pipeline schedule refuses."""

from typing import assert_never

from moe.spec import Problem
from moe.spec.parallel import PipelineSchedule


def micro_batches_problem(name: PipelineSchedule, num_ranks: int, num_micro_batches: int) -> Problem | None:
    """Problem of too few micro-batches in a step, of one data rank."""
    least = min_micro_batches(name, num_ranks)
    if num_micro_batches >= least:
        return None
    return Problem("out_of_range", "parallel.schedule", name,
                   f"needs at least {least} micro-batches to keep {num_ranks} pipeline ranks busy, but a step has "
                   f"{num_micro_batches}",
                   "use a smaller parallel.micro_batch_groups, larger batches, fewer pipeline ranks, or gpipe, which "
                   "runs any number")  # fmt: skip


def min_micro_batches(name: PipelineSchedule, num_ranks: int) -> int:
    """Fewest micro-batches of a step that a schedule accepts: below, some rank waits at any time. GPipe accepts any
    number."""
    match name:
        case "gpipe":
            return 1
        case "1f1b" | "interleaved" | "zero_bubble":
            return num_ranks
        case "zb_v":
            return 2 * num_ranks - 1
        case _:
            assert_never(name)
