"""Refusal of a job that fits in no layout: how much memory lacks, and what would be enough."""

from dataclasses import dataclass

from moe.plan.candidate import Candidate
from moe.plan.plan import FewestWorkers, MemoryEstimate
from moe.plan.search.explain import number_of, size_of
from moe.spec import AdapterSpec
from moe.spec.errors import Problem


@dataclass(frozen=True)
class Lacking:
    """The layout that needs the least memory, which still does not fit."""

    candidate: Candidate
    memory: MemoryEstimate
    not_yet: tuple[str, ...]
    """Parts of it that cannot be run yet."""


def does_not_fit(lacking: Lacking, fewest: FewestWorkers, adapter: AdapterSpec | None) -> Problem:
    """Error for a job that fits in no layout: the memory that lacks, the number of workers that would hold it in any
    layout and in one that can be run, and the adapter that would fit on the present workers, if any."""
    kinds = {kind: amount for kind, amount in lacking.memory.by_kind().items() if kind != "allowance"}
    largest, usable = (
        max(kinds, key=lambda kind: kinds[kind]),
        lacking.memory.limit - lacking.memory.allowance,
    )
    total = sum(kinds.values())
    blocked = (
        f" (in a layout that cannot be run yet: {', '.join(lacking.not_yet)})" if lacking.not_yet else ""
    )
    workers = number_of(lacking.candidate.degrees.num_workers, "worker")
    remedies = [would_hold(fewest)]
    if adapter is not None:
        remedies.append(f"train adapters in place of all weights, which {workers} hold: {_in_words(adapter)}")
    return Problem(
        "resources", workers,
        f"must hold the model, but a device would need {size_of(total)} of {size_of(usable)} usable{blocked}, "
        f"{size_of(total - usable)} too much; {size_of(kinds[largest])} of it is {largest}",
        "; or ".join(remedies),
    )  # fmt: skip


def would_hold(fewest: FewestWorkers) -> str:
    """Remedy: the sizes of this kind of cluster that hold a job."""
    if fewest.in_any_layout is None:
        return (
            "no number of workers would do: use devices with more memory, smaller groups or a smaller model"
        )
    others = "devices with more memory, or a smaller model"
    if fewest.to_run is None:
        return f"use {fewest.in_any_layout:,} workers of this kind, only in a layout that cannot be run yet, {others}"
    remedy = f"use {fewest.to_run:,} workers of this kind"
    if fewest.in_any_layout != fewest.to_run:
        remedy += f" ({fewest.in_any_layout:,} would hold it in a layout that cannot be run yet)"
    return f"{remedy}, {others}"


def _in_words(adapter: AdapterSpec) -> str:
    return f"adapter: {{rank: {adapter.rank}, base: {adapter.base}}}"
