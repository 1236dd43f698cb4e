"""A plan's pipeline schedule, stage cut and context exchange, as sentences."""

from collections.abc import Iterator

from moe.plan.plan import Plan
from moe.spec.parallel import ContextExchange, PipelineSchedule
from moe.spec.stages import format_stages

_SCHEDULES: dict[PipelineSchedule, str] = {
    "gpipe": "all forward passes, then all backward passes",
    "1f1b": "forward and backward passes alternate",
    "interleaved": "forward and backward passes of a rank's virtual stages alternate",
    "zero_bubble": "weight gradients are computed where a rank would wait",
    "zb_v": "weight gradients are computed where a rank would wait; the first and the last stage share a rank",
}
_EXCHANGES: dict[ContextExchange, str] = {
    "gather": "each rank gathers the keys and values of whole sequences",
    "ring": "keys and values travel from rank to rank, behind attention to those before",
    "heads": "each rank attends to whole sequences with its share of the heads",
}


def schedule_reasons(plan: Plan, user_fields: set[str]) -> Iterator[str]:
    """Yield a sentence for each choice of a schedule or an exchange in the plan. `user_fields`: fields of `parallel`
    that the job sets."""
    options = plan.options
    if options.virtual_stages > 1:
        requested = _requested("virtual_stages", user_fields)
        yield f"{options.virtual_stages} virtual stages per rank{requested}: a smaller pipeline bubble"
    if options.schedule is not None:
        yield f"schedule {options.schedule}{_requested('schedule', user_fields)}: {_SCHEDULES[options.schedule]}"
    if options.stages is not None:
        requested = _requested("stages", user_fields)
        yield f"layers of each stage, in model order{requested}: {format_stages(options.stages)}"
    if plan.degrees.context > 1:
        requested = _requested("context_exchange", user_fields)
        yield f"context_exchange {options.context_exchange}{requested}: {_EXCHANGES[options.context_exchange]}"


def _requested(field: str, user_fields: set[str]) -> str:
    return ", as requested" if field in user_fields else ""
