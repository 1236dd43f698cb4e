"""Pipeline stages: their units, and their micro-batches in flight."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from moe.plan.cost.units import Unit


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage; of stages with the same units, the first, which has the most micro-batches in flight."""

    index: int
    units: tuple[tuple[Unit, int], ...]
    """(unit, count) pairs."""


@lru_cache(512)
def stages(units: tuple[Unit, ...], pipeline: int, virtual_stages: int) -> tuple[Stage, ...]:
    """Return the distinct stages of a pipeline, in order.

    Units are split into runs of consecutive units, as even as possible, the longer runs first; embeddings and head
    count as one unit each. With `virtual_stages`, stage i has the runs i, p + i, 2p + i, ... In a pipeline the head
    has its own copy of an embedding table that it shares with the embeddings.
    """
    if pipeline > 1:
        units = tuple(unit.apart for unit in units)
    runs = pipeline * virtual_stages
    units_per_run, longer = divmod(len(units), runs)
    ends = [(run + 1) * units_per_run + min(run + 1, longer) for run in range(runs)]
    starts = [0, *ends[:-1]]
    stage_of_units: dict[tuple[tuple[Unit, int], ...], Stage] = {}
    for index in range(pipeline):
        units_here: Counter[Unit] = Counter()
        for run in range(index, runs, pipeline):
            units_here.update(units[starts[run] : ends[run]])
        stage_of_units.setdefault(tuple(units_here.items()), Stage(index, tuple(units_here.items())))
    return tuple(stage_of_units.values())


@lru_cache(512)
def shares(units: tuple[Unit, ...], pipeline: int) -> tuple[Stage, ...]:
    """Return lower bounds on how many units of one kind some stage has, each as a stage of these units alone. They
    hold for any number of virtual stages.

    Some stage, possibly the last, has the even share of each kind. And stages differ by at most one unit: of the
    first j stages, one has at least units // p less a j-th of all units of other kinds, and it is stage j or an
    earlier one.
    """
    if pipeline == 1:
        return tuple(Stage(0, ((unit, count),)) for unit, count in Counter(units).items())
    counts = Counter(unit.apart for unit in units)
    lower_bounds = []
    for unit, count in counts.items():
        lower_bounds.append(Stage(pipeline - 1, ((unit, -(-count // pipeline)),)))
        num_other_units, least = len(units) - count, 0
        for index in range(pipeline - 1) if unit.is_layer else ():
            if (number := len(units) // pipeline - num_other_units // (index + 1)) > least:
                lower_bounds.append(Stage(index, ((unit, number),)))
                least = number
    return tuple(lower_bounds)


def in_flight(stage: int, pipeline: int, virtual_stages: int, num_micro_batches: int) -> float:
    """Return the most micro-batches whose activations wait for their backward pass, counted in all units of the
    stage.

    1F1B schedule (arXiv 2104.04473): `p - i`. Interleaved 1F1B: `2(p - i - 1) + (v - 1)p` warm-up runs, each of a
    v-th of the units, plus the current one.
    """
    if virtual_stages == 1:
        return min(num_micro_batches, pipeline - stage)
    runs = 2 * (pipeline - stage - 1) + (virtual_stages - 1) * pipeline + 1
    return min(num_micro_batches, runs / virtual_stages)
