"""Candidate with the least memory, and the smallest cluster that holds a job."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import count
from math import inf, lcm
from operator import add
from typing import NamedTuple

from moe.plan.candidate import Candidate, Options
from moe.plan.cluster.cluster import Cluster
from moe.plan.cost.memory import MemoryModel
from moe.plan.cost.run_choices import StateOptions
from moe.plan.degrees import Degrees, WorkSplit
from moe.plan.executable import not_yet
from moe.plan.search.choices import LayoutChoices
from moe.spec import JobSpec

MAX_NODES = 16_384
_TRY_ALL_UP_TO = 16
"""Every number of nodes up to this one is tried, if no doubling holds the job."""


class _Bounded(NamedTuple):
    """A candidate with the smallest micro-batches, for any number of virtual stages."""

    bound_bytes: int
    number: int
    """Tie-breaker: insertion order."""
    degrees: Degrees
    options: Options

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.degrees, self.options)


class Smallest:
    """Finds the least memory and the smallest cluster for a job."""

    def __init__(self, spec: JobSpec, cluster: Cluster, memory: MemoryModel) -> None:
        self._spec, self._cluster, self._memory = spec, cluster, memory
        self._recomputes = LayoutChoices(spec, cluster, memory.profile).recomputes()
        self._min_workers = cache(self._fewest)

    def candidate(self, choices: LayoutChoices, shapes: Iterable[Degrees], *, to_run: bool = False) -> Candidate | None:
        """The candidate with the least memory; with `to_run`, of runnable ones. None if there is none."""
        best: Candidate | None = None
        least_bytes: float = inf
        entries = (entry for shape in shapes for entry in self._bounded_candidates(choices, shape, to_run=to_run))
        for entry in sorted(entry._replace(number=number) for number, entry in enumerate(entries)):
            if entry.bound_bytes > least_bytes:
                break
            for candidate, total in self._candidates(choices, entry, least_bytes):
                if best is None or (total, candidate.key) < (least_bytes, best.key):
                    best, least_bytes = candidate, total
        return best

    def fits(
        self, choices: LayoutChoices, shapes: Iterable[Degrees], limit_bytes: int, *, to_run: bool = False
    ) -> bool:
        """Whether any candidate takes at most `limit_bytes`."""
        usable_bytes = limit_bytes - self._memory.allowance
        bounds = (
            (self._memory.min_state_bytes(shape), shape.order, shape)
            for shape in shapes
            if not (to_run and self._not_yet(Candidate(shape)))
        )
        for _, _, shape in sorted(bounded_shape for bounded_shape in bounds if bounded_shape[0] <= usable_bytes):
            for entry in sorted(self._bounded_candidates(choices, shape, to_run=to_run)):
                if entry.bound_bytes > limit_bytes:
                    break
                if any(True for _ in self._candidates(choices, entry, limit_bytes)):
                    return True
        return False

    def _bounded_candidates(self, choices: LayoutChoices, shape: Degrees, *, to_run: bool) -> Iterator[_Bounded]:
        if to_run and self._not_yet(Candidate(shape)):
            return
        memory, plain, numbers = self._memory, choices.plain(shape), count()
        placements = [
            (degrees, sharding) for degrees, sharding in choices.data_shardings(shape)
            if not (to_run and self._not_yet(Candidate(degrees, replace(plain.options, sharding=sharding))))
        ]  # fmt: skip
        share_state_bytes = cache(memory.share_state_bytes)
        for recompute in choices.recomputes():
            run = plain.with_options(recompute=recompute)
            non_state = memory.non_state_shares(run)
            for degrees, sharding in placements:
                state = share_state_bytes(StateOptions(degrees, sharding, recompute == "full"))
                options = replace(run.options, sharding=sharding)
                yield _Bounded(max(map(add, state, non_state)) + memory.allowance, next(numbers), degrees, options)

    def _not_yet(self, candidate: Candidate) -> tuple[str, ...]:
        return not_yet(self._spec, candidate, self._memory.profile.name)

    def _candidates(
        self, choices: LayoutChoices, entry: _Bounded, limit_bytes: float
    ) -> Iterator[tuple[Candidate, int]]:
        """(candidate, bytes) pairs of virtual stages within `limit_bytes`."""
        if self._memory.exceeds(entry.candidate, limit_bytes):
            return
        for virtual_stages in choices.virtual_stages(entry.degrees.pipeline, entry.options.num_micro_batches):
            candidate = entry.candidate.with_options(virtual_stages=virtual_stages)
            if (total := self._memory.total(candidate)) <= limit_bytes:
                yield candidate, total

    def cluster(self, *, to_run: bool = False) -> Cluster | None:
        """The smallest cluster with a worker on each device that holds the job: part of a node, or whole nodes up to
        the first doubling that holds it. None if no doubling to `MAX_NODES` and no number of nodes to 16 does."""
        per_node, multiple = (
            self._cluster.devices_per_node,
            LayoutChoices(self._spec, self._cluster, self._memory.profile).multiple,
        )
        usable = max(1, self._cluster.memory_bytes - self._memory.allowance)
        fewest = -(-self._memory.min_state_bytes(Degrees()) // usable)
        for workers in range(multiple, per_node, multiple):
            if workers >= fewest and self.holds(workers, to_run=to_run):
                return self._cluster.sized_for(workers)
        unit, limit = lcm(per_node, multiple), MAX_NODES * per_node
        doublings = (unit << power for power in range((limit // unit).bit_length()))
        enough = next((number for number in doublings if number >= fewest and self.holds(number, to_run=to_run)), None)
        first, end = -(-fewest // unit) * unit, unit * (_TRY_ALL_UP_TO + 1) if enough is None else enough
        sizes = range(max(unit, first), end, unit)
        num_devices = next((number for number in sizes if self.holds(number, to_run=to_run)), enough)
        return None if num_devices is None else self._cluster.sized_for(num_devices)

    def holds(self, workers: int, *, to_run: bool = False) -> bool:
        """Whether any layout on this many workers fits."""
        choices = LayoutChoices(self._spec, self._cluster.sized_for(workers), self._memory.profile)
        shapes = (
            shape for shape in choices.shapes(workers)
            if not (to_run and self._not_yet(Candidate(shape)))
            and self._min_workers(shape.pipeline, shape.split) <= workers and choices.fits_nodes(shape)
        )  # fmt: skip
        return self.fits(choices, shapes, self._cluster.memory_bytes, to_run=to_run)

    def _fewest(self, pipeline: int, split: WorkSplit) -> float:
        """Lower bound of the workers for these degrees, for any data degree and options."""
        overlaps = bool(self._spec.parallel.overlap)
        return min(
            self._memory.min_workers(pipeline, split, recompute, overlaps=overlaps) for recompute in self._recomputes
        )
