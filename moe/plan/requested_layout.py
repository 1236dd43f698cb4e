"""Layouts that override a job's `parallel`."""

from dataclasses import replace
from typing import Any

from moe.plan.plan import Plan
from moe.plan.request import PlanRequest
from moe.spec import JobSpec, ParallelSpec, spec_error
from moe.spec.stages import format_stages

Layout = dict[str, bool | int | str]
"""Fields of `parallel`."""

_EXAMPLE = "tensor=2,expert=8,micro_batch_groups=1"


def parse_layout(text: str, place: str) -> Layout:
    """Parse `tensor=2,recompute=full` into `{"tensor": 2, "recompute": "full"}`. Raises SpecError with path `place`."""
    layout: Layout = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not name or not value:
            raise spec_error(
                "invalid_syntax", place, text, "must list fields of parallel with values", f"write it as {_EXAMPLE}"
            )
        if name not in ParallelSpec.model_fields or name == "auto":
            fields = ", ".join(field for field in ParallelSpec.model_fields if field != "auto")
            raise spec_error(
                "unknown_key", f"{place}: {name}", value, "is not a field of parallel", f"use one of {fields}"
            )
        if name in layout:
            raise spec_error("duplicate", f"{place}: {name}", value, "is given twice", "omit one")
        layout[name] = _value(value)
    return layout


def _value(text: str) -> bool | int | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text


def pinned_layout(plan: Plan) -> Layout:
    """`parallel` fields that pin a plan's layout. Raises SpecError for a module's plan, which they cannot express."""
    if plan.module is not None:
        raise spec_error(
            "not_applicable", "module", None, "has a layout that parallel cannot express", "give a job's plan"
        )
    degrees, options = plan.degrees, plan.options
    layout: Layout = {
        **vars(degrees), "recompute": options.recompute, "virtual_stages": options.virtual_stages,
        "num_chunks": options.num_chunks, "overlap": options.overlap, "micro_batch_groups": options.micro_batch_groups,
        "dispatch": "flat" if options.ranks_per_node is None else "hierarchical",
    }  # fmt: skip
    if plan.candidate.is_sharded:
        layout["sharding"] = options.sharding
    if options.schedule is not None:
        layout["schedule"] = options.schedule
    if options.stages is not None:
        layout["stages"] = format_stages(options.stages)
    if degrees.context > 1:
        layout["context_exchange"] = options.context_exchange
    return layout


def request_layout(request: PlanRequest, layout: Layout, num_workers: int) -> PlanRequest:
    """Return the request with this layout and no runners-up. Raises SpecError."""
    fields: dict[str, Any] = request.spec.model_dump(mode="json", exclude_unset=True)
    spec = JobSpec.parse({**fields, "parallel": layout})
    return replace(request, spec=spec, query=replace(request.query, num_workers=num_workers, top=1))
