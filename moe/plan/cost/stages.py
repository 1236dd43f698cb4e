"""Pipeline stages: their units, and their micro-batches in flight."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from moe.plan.cost.units import Unit
from moe.spec.stages import even_stages


@dataclass(frozen=True, eq=False)
class Stage:
    """Pipeline stage; the first of the stages with equal units, which has the most micro-batches in flight."""

    index: int
    units: tuple[tuple[Unit, int], ...]
    """(unit, count) pairs."""


@lru_cache(512)
def stages(units: tuple[Unit, ...], pipeline: int, virtual_stages: int) -> tuple[Stage, ...]:
    """Distinct stages of a pipeline, in order.

    Units (layers, embeddings, head) are split into runs as even as possible (`even_stages`). With
    `virtual_stages`, stage i has the runs i, p + i, 2p + i, ... In a pipeline the head has its own copy of a tied
    embedding table.
    """
    if pipeline > 1:
        units = tuple(unit.untied for unit in units)
    runs = pipeline * virtual_stages
    num_layers = sum(unit.is_layer for unit in units)
    if num_layers < runs:  # a peer's, with the embeddings or the head alone
        lengths = [1] * runs
    else:
        lengths = list(even_stages(num_layers, runs))
        lengths[0] += 1  # the embeddings
    ends = [*accumulate(lengths[:-1]), len(units)]
    starts = [0, *ends[:-1]]
    stage_of_units: dict[tuple[tuple[Unit, int], ...], Stage] = {}
    for index in range(pipeline):
        stage_units: Counter[Unit] = Counter()
        for run in range(index, runs, pipeline):
            stage_units.update(units[starts[run] : ends[run]])
        stage_of_units.setdefault(tuple(stage_units.items()), Stage(index, tuple(stage_units.items())))
    return tuple(stage_of_units.values())


@lru_cache(512)
def shares(units: tuple[Unit, ...], pipeline: int) -> tuple[Stage, ...]:
    """Lower bounds of the units of one kind on some stage, each as a stage of only these units, for any number of
    virtual stages.

    Some stage, possibly the last, has at least the even share of each kind. Since each stage has n // p units or one
    more, one of the first j stages has at least n // p minus 1 / j of all other units.
    """
    if pipeline == 1:
        return tuple(Stage(0, ((unit, count),)) for unit, count in Counter(units).items())
    counts = Counter(unit.untied for unit in units)
    lower_bounds = []
    for unit, count in counts.items():
        lower_bounds.append(Stage(pipeline - 1, ((unit, -(-count // pipeline)),)))
        num_other_units, min_count = len(units) - count, 0
        for index in range(pipeline - 1) if unit.is_layer else ():
            if (number := len(units) // pipeline - num_other_units // (index + 1)) > min_count:
                lower_bounds.append(Stage(index, ((unit, number),)))
                min_count = number
    return tuple(lower_bounds)


def in_flight(stage: int, pipeline: int, virtual_stages: int, num_micro_batches: int) -> float:
    """Most micro-batches whose activations await the backward pass, in units of the whole stage.

    1F1B (arXiv 2104.04473): `p - i`. Interleaved: `2(p - i - 1) + (v - 1)p` warm-up runs, a v-th of the units each,
    and the current one.
    """
    if virtual_stages == 1:
        return min(num_micro_batches, pipeline - stage)
    runs = 2 * (pipeline - stage - 1) + (virtual_stages - 1) * pipeline + 1
    return min(num_micro_batches, runs / virtual_stages)
