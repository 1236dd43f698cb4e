"""Refusal of a job that fits in no layout."""

from dataclasses import dataclass

from moe.plan.candidate import Candidate
from moe.plan.plan import FewestWorkers, MemoryEstimate
from moe.plan.quantities import format_bytes, pluralize
from moe.spec.errors import Problem


@dataclass(frozen=True)
class InfeasibleLayout:
    """The layout with the least memory, which still does not fit."""

    candidate: Candidate
    memory: MemoryEstimate
    not_yet: tuple[str, ...]
    unwritten: tuple[str, ...] = ()
    """Unset keys that default to float32, if the devices have bfloat16."""


def does_not_fit(
    infeasible: InfeasibleLayout, fewest: FewestWorkers, narrow: str | None, adapter: str | None
) -> Problem:
    """Problem of a job that fits in no layout: missing memory, enough workers (in any layout, in a runnable one),
    and changes to the job that would make it fit."""
    kinds = {kind: amount for kind, amount in infeasible.memory.by_kind().items() if kind != "allowance"}
    largest, usable = (max(kinds, key=lambda kind: kinds[kind]), infeasible.memory.limit - infeasible.memory.allowance)
    total = sum(kinds.values())
    caveat = f" (in a layout that cannot be run yet: {', '.join(infeasible.not_yet)})" if infeasible.not_yet else ""
    num_workers = infeasible.candidate.degrees.num_workers
    workers, hold = pluralize(num_workers, "worker"), "holds" if num_workers == 1 else "hold"
    rule = (
        f"must hold the model, but a device would need {format_bytes(total)} of {format_bytes(usable)} "
        f"usable{caveat}, {format_bytes(total - usable)} too much; the largest part is {largest}, "
        f"{format_bytes(kinds[largest])}"
    )
    if infeasible.unwritten:
        verb = "is" if len(infeasible.unwritten) == 1 else "are"
        rule += f"; {' and '.join(infeasible.unwritten)} {verb} not set: float32 by default"
    by_dtype, by_adapter = (
        None if change is None else f"{change}, which {workers} {hold}" for change in (narrow, adapter)
    )
    remedies = [remedy for remedy in (by_dtype, cluster_size_remedy(fewest), by_adapter) if remedy is not None]
    return Problem("does_not_fit", "resources", workers, rule, "; or ".join(remedies))


def cluster_size_remedy(fewest: FewestWorkers) -> str:
    """Remedy: cluster sizes of this kind that hold the job."""
    if fewest.in_any_layout is None:
        return "no number of workers is enough: use devices with more memory, smaller groups or a smaller model"
    alternatives = "devices with more memory, or a smaller model"
    if fewest.to_run is None:
        return (
            f"use {fewest.in_any_layout:,} workers of this kind, only in a layout that cannot be run yet, "
            f"{alternatives}"
        )
    remedy = f"use {fewest.to_run:,} workers of this kind"
    if fewest.in_any_layout != fewest.to_run:
        remedy += f" ({fewest.in_any_layout:,} would hold it in a layout that cannot be run yet)"
    return f"{remedy}, {alternatives}"
