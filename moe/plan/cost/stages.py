"""Pipeline stages: the units of each, and the micro-batches in flight on it."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from moe.plan.cost.units import Unit


@dataclass(frozen=True, eq=False)
class Stage:
    """A pipeline stage. It stands for all stages with the same units: the first of them, with the most micro-batches
    in flight."""

    index: int
    units: tuple[tuple[Unit, int], ...]
    """Kinds of units, with their counts."""


@lru_cache(512)
def stages(units: tuple[Unit, ...], pipeline: int, virtual_stages: int) -> tuple[Stage, ...]:
    """Stages that differ, in order.

    Units are dealt out in runs as even as they come, the longer ones first; embeddings and head count as one each. With
    `virtual_stages`, stage i has the runs i, p + i, 2p + i, ... In a pipeline the head has its own copy of a table that
    it shares with the embeddings.
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
    """Numbers of one kind of unit that some stage has at least, as if that had nothing else, however many virtual
    stages there are.

    Of each kind some stage has the even share, which may be the last stage. And all stages have as many units, or one
    more: so of the first j, one has as many less a j-th of all other units, and it is the j-th or one before."""
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
    """Micro-batches, of all the stage's units, whose activations wait for their backward pass at most.

    One forward, one backward in turns (arXiv 2104.04473): `p - i` of them; with virtual stages, warm-up takes
    `2(p - i - 1) + (v - 1)p` runs of a v-th of the units each, and one more is at work.
    """
    if virtual_stages == 1:
        return min(num_micro_batches, pipeline - stage)
    runs = 2 * (pipeline - stage - 1) + (virtual_stages - 1) * pipeline + 1
    return min(num_micro_batches, runs / virtual_stages)
