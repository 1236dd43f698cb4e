"""Sizes that a pipeline schedule refuses."""

from typing import assert_never

from moe.plan.schedule.by_name import ScheduleName
from moe.spec import Problem


def schedule_problems(
    name: ScheduleName, num_ranks: int, virtual_stages: int, num_micro_batches: int | None = None
) -> list[Problem]:
    """Problems of a schedule's sizes. `num_micro_batches`: of a step, on a data rank; None where it is not known."""
    problems = []
    if problem := _virtual_stages_problem(name, virtual_stages):
        problems.append(problem)
    least = least_micro_batches(name, num_ranks)
    if num_micro_batches is not None and num_micro_batches < least:
        problems.append(
            Problem(
                "out_of_range",
                "parallel.schedule",
                name,
                f"needs at least {least} micro-batches on {num_ranks} pipeline ranks to keep all of them busy, and "
                f"a step has {num_micro_batches}",
                "use a smaller parallel.micro_batch_groups, larger batches, fewer pipeline ranks, or gpipe, which "
                "runs any number",
            )
        )
    return problems


def least_micro_batches(name: ScheduleName, num_ranks: int) -> int:
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


def _virtual_stages_problem(name: ScheduleName, virtual_stages: int) -> Problem | None:
    match name:
        case "gpipe" | "1f1b" | "zero_bubble":
            fits, rule, remedy = virtual_stages == 1, "must be 1", "omit it, or use the schedule interleaved"
        case "interleaved":
            fits, rule, remedy = virtual_stages >= 2, "must be at least 2", "raise it, or use the schedule 1f1b"
        case "zb_v":
            fits, rule, remedy = virtual_stages == 2, "must be 2", "use 2, or the schedule interleaved"
        case _:
            assert_never(name)
    if fits:
        return None
    return Problem("mismatch", "parallel.virtual_stages", virtual_stages, f"{rule} with the schedule {name}", remedy)
