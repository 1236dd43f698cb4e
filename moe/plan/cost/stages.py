"""Pipeline stages: their units, and their micro-batches in flight."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from moe.plan.candidate import Candidate
from moe.plan.cost.units import Unit
from moe.plan.schedule import activations_bound, rank_of_stage, stages_of_rank
from moe.spec.parallel import PipelineSchedule
from moe.spec.stages import even_stages


class PipelineChoices(NamedTuple):
    """Choices of a candidate that its stages and their micro-batches in flight depend on."""

    pipeline: int = 1
    virtual_stages: int = 1
    schedule: PipelineSchedule = "1f1b"
    stages: tuple[int, ...] | None = None
    """Layers of each virtual stage; None: as even as possible."""

    @classmethod
    def from_candidate(cls, candidate: Candidate) -> "PipelineChoices":
        pipeline, options = candidate.degrees.pipeline, candidate.options
        if pipeline == 1:
            return cls()
        return cls(pipeline, options.virtual_stages, candidate.schedule, options.stages)


@dataclass(frozen=True, eq=False)
class Stage:
    """Units of a pipeline rank. Of ranks with equal units, the first has the most micro-batches in flight."""

    index: int
    units: tuple[tuple[Unit, int], ...]
    """(unit, count) pairs."""


@lru_cache(512)
def stages(units: tuple[Unit, ...], choices: PipelineChoices) -> tuple[Stage, ...]:
    """Distinct ranks of a pipeline, in order: of those with equal units, the first."""
    distinct: dict[tuple[tuple[Unit, int], ...], Stage] = {}
    for stage in rank_stages(units, choices):
        distinct.setdefault(stage.units, stage)
    return tuple(distinct.values())


def rank_stages(units: tuple[Unit, ...], choices: PipelineChoices) -> tuple[Stage, ...]:
    """Units of every pipeline rank.

    Layers are cut into virtual stages, the embeddings with the first and the head with the last. Unless both are
    on one rank, the head has its own copy of a tied embedding table.
    """
    pipeline, virtual_stages, schedule, cut = choices
    last_rank = rank_of_stage(schedule, pipeline * virtual_stages - 1, pipeline, virtual_stages)
    if last_rank != rank_of_stage(schedule, 0, pipeline, virtual_stages):
        units = tuple(unit.untied for unit in units)
    ends = _ends(units, pipeline * virtual_stages, cut)
    starts = [0, *ends[:-1]]
    by_rank = []
    for index in range(pipeline):
        stage_units: Counter[Unit] = Counter()
        for run in stages_of_rank(schedule, index, pipeline, virtual_stages):
            stage_units.update(units[starts[run] : ends[run]])
        by_rank.append(Stage(index, tuple(stage_units.items())))
    return tuple(by_rank)


def _ends(units: tuple[Unit, ...], num_stages: int, cut: tuple[int, ...] | None) -> list[int]:
    """Index of the unit after each virtual stage."""
    num_layers = sum(unit.is_layer for unit in units)
    if cut is None and num_layers < num_stages:  # a peer's, with the embeddings or the head alone
        shortest, longer = divmod(len(units), num_stages)
        return list(accumulate(shortest + (stage < longer) for stage in range(num_stages)))
    first, *others = even_stages(num_layers, num_stages) if cut is None else cut
    return [*accumulate([1 + first, *others[:-1]]), len(units)] if others else [len(units)]


@lru_cache(512)
def shares(units: tuple[Unit, ...], pipeline: int, *, are_even: bool = True) -> tuple[Stage, ...]:
    """Lower bounds of the units of one kind on some rank, each as a stage of only these units, for any number of
    virtual stages.

    Some rank, possibly the last, has at least the even share of each kind. If ranks are even (`are_even`), each has
    n // p units or one more, so that one of the first j has at least n // p minus 1 / j of all other units.
    """
    if pipeline == 1:
        return tuple(Stage(0, ((unit, count),)) for unit, count in Counter(units).items())
    counts = Counter(unit.untied if are_even else unit for unit in units)
    lower_bounds = []
    for unit, count in counts.items():
        lower_bounds.append(Stage(pipeline - 1, ((unit, -(-count // pipeline)),)))
        num_other_units, min_count = len(units) - count, 0
        for index in range(pipeline - 1) if unit.is_layer and are_even else ():
            if (number := len(units) // pipeline - num_other_units // (index + 1)) > min_count:
                lower_bounds.append(Stage(index, ((unit, number),)))
                min_count = number
    return tuple(lower_bounds)


def in_flight(rank: int, choices: PipelineChoices, num_micro_batches: int) -> float:
    """Most micro-batches whose activations await the gradients computed from them, in units of all stages of the
    rank."""
    pipeline, virtual_stages, schedule, _ = choices
    return activations_bound(schedule, rank, pipeline, virtual_stages, num_micro_batches) / virtual_stages
