"""Branch-and-bound search for the fastest layouts of one shape."""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from operator import add
from typing import NamedTuple

from moe.plan.candidate import Candidate, Options, Recompute
from moe.plan.cost.stages import PipelineChoices
from moe.plan.cost.time import TimeModel
from moe.plan.degrees import Degrees
from moe.plan.executable import not_yet
from moe.plan.profile import ProfileName
from moe.plan.search.choices import LayoutChoices
from moe.plan.search.memory_constraint import MemoryConstraint
from moe.spec import JobSpec

TIES = 1 + 1e-5
"""Factor within which step times may round to the same six digits."""


@dataclass(frozen=True)
class RankedCandidate:
    """A candidate that fits in memory."""

    candidate: Candidate
    shape: Degrees
    step_s: float
    not_yet: tuple[str, ...]

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key: the rounded step time, then the tie-breaking key."""
        return (float(f"{self.step_s:.6g}"), *self.candidate.key)


@dataclass
class Fastest:
    """The `number` fastest candidates added, one per shape or of any shapes."""

    number: int
    one_of_each: bool = True
    max_s: float = inf
    entries: list[RankedCandidate] = field(default_factory=list)
    limit_s: float = field(init=False)
    """Step time above which no candidate enters."""

    def __post_init__(self) -> None:
        self.limit_s = self.max_s

    def limit_of(self, shape: Degrees) -> float:
        """Step time above which no candidate of this shape enters."""
        incumbent = self._entry_of(shape)
        return self.limit_s if incumbent is None else min(self.limit_s, incumbent.step_s * TIES)

    def add(self, candidate: RankedCandidate) -> None:
        if (incumbent := self._entry_of(candidate.shape)) is not None:
            if incumbent.order <= candidate.order:
                return
            self.entries.remove(incumbent)
        insort(self.entries, candidate, key=lambda entry: entry.order)
        del self.entries[self.number :]
        if len(self.entries) == self.number:
            self.limit_s = min(self.max_s, self.entries[-1].step_s * TIES)

    def _entry_of(self, shape: Degrees) -> RankedCandidate | None:
        if not self.one_of_each:
            return None
        return next((entry for entry in self.entries if entry.shape == shape), None)


@dataclass(frozen=True)
class Models:
    """Search space and cost models of a search."""

    spec: JobSpec
    profile: ProfileName
    choices: LayoutChoices
    time: TimeModel
    constraint_of: Callable[[Degrees], MemoryConstraint]

    def not_yet(self, candidate: Candidate) -> tuple[str, ...]:
        return not_yet(self.spec, candidate, self.profile)

    def groups(self, shape: Degrees) -> int:
        return -(-self.spec.num_groups // shape.data_ranks)

    def min_groups(self, shape: Degrees, smallest: int) -> float:
        """Lower bound of a step in token groups: those of a data rank, plus the bubble, with micro-batches of at
        least `smallest`."""
        most_virtual = self.choices.virtual_stages(shape.pipeline, self.groups(shape))[-1]
        return self.groups(shape) + smallest * self.choices.min_bubble * (shape.pipeline - 1) / most_virtual


class _SearchNode(NamedTuple):
    """Open node of the search: unexplored layouts of any placement and dispatch."""

    bound_s: float
    number: int
    """Tie-breaker: insertion order."""
    recompute: Recompute
    size: int
    """Index of the micro-batch size."""
    virtual_stages: int | None = None
    """For this size only; None for any number, and all smaller sizes too."""


class ShapeSearch:
    """Searches the fastest layouts of one shape that fit; with `to_run`, runnable ones. `bound_s`: lower bound of
    its step time."""

    def __init__(self, models: Models, shape: Degrees, bound_s: float, fastest: Fastest, *, to_run: bool) -> None:
        self._models, self._shape, self._bound_s = models, shape, bound_s
        self._fastest, self._to_run = fastest, to_run
        self._ranks_per_node = models.choices.ranks_per_node(shape)
        self._numbers = count()

    def steps(self) -> Iterator[float]:
        """Add results to `fastest`, the most promising first; yield before each step the lower bound of what is
        left."""
        self._constraint = self._models.constraint_of(self._shape)
        queue = [_SearchNode(self._bound_s, next(self._numbers), *largest) for largest in self._constraint.largest]
        while queue and queue[0].bound_s <= self._fastest.limit_of(self._shape):
            yield queue[0].bound_s
            branch = heappop(queue)
            if branch.virtual_stages is not None:
                self._evaluate(branch)
                continue
            for child in self._branches(branch):
                heappush(queue, child)

    @cached_property
    def _gather_seconds(self) -> dict[int, tuple[float, ...]]:
        """Lower bound of the seconds that parameter gathers add, by placement index and unit kind; with `to_run`, of
        runnable placements."""
        gathers = {}
        for number, (degrees, sharding) in enumerate(self._constraint.data_shardings):
            candidate = Candidate(degrees, Options(sharding=sharding))
            if not (self._to_run and self._models.not_yet(candidate)):
                gathers[number] = self._models.time.min_gather_seconds(candidate)
        return gathers

    def _unit_seconds(self, run: Candidate, *, overlaps: bool) -> tuple[float, ...]:
        return self._models.time.min_unit_seconds(run, self._ranks_per_node, overlaps=overlaps)

    def _branches(self, branch: _SearchNode) -> Iterator[_SearchNode]:
        """Branch into this size with each number of virtual stages, and all smaller sizes."""
        run, time = self._constraint.run(branch.recompute, branch.size), self._models.time
        pipeline, limit_s = self._shape.pipeline, self._fastest.limit_of(self._shape)
        overlaps = branch.recompute != "full"
        alone_s = time.on_even_stages_s(self._unit_seconds(run, overlaps=overlaps), pipeline)
        numbers = self._models.choices.virtual_stages(pipeline, run.options.num_micro_batches)
        counts = {virtual_stages: self._effective_micro_batches(run, virtual_stages) for virtual_stages in numbers}
        if counts and alone_s * min(counts.values()) <= limit_s:
            one_s = cache(partial(self._min_micro_batch_s, run))
            can_overlap = {
                virtual_stages: self._can_overlap(run.with_options(virtual_stages=virtual_stages))
                for virtual_stages in (1, 2)
            }
            for virtual_stages, times in counts.items():
                bound_s = one_s(can_overlap[min(2, virtual_stages)]) * times
                if bound_s <= limit_s and bound_s < inf:
                    yield branch._replace(bound_s=bound_s, number=next(self._numbers), virtual_stages=virtual_stages)
        sizes = self._constraint.sizes
        if branch.size + 1 < len(sizes):  # a token group is no faster in a smaller micro-batch
            min_groups = self._models.min_groups(self._shape, sizes[-1][0])
            bound_s = alone_s / run.options.micro_batch_groups * min_groups
            yield branch._replace(bound_s=bound_s, number=next(self._numbers), size=branch.size + 1)

    def _effective_micro_batches(self, run: Candidate, virtual_stages: int) -> float:
        """Micro-batches, plus at least the bubble in micro-batches."""
        bubble = self._models.choices.min_bubble * (self._shape.pipeline - 1) / virtual_stages
        return run.options.num_micro_batches + bubble

    def _can_overlap(self, run: Candidate) -> bool:
        return self._models.choices.can_overlap(run)

    def _min_micro_batch_s(self, run: Candidate, overlaps: bool) -> float:
        """Lower bound of a micro-batch's seconds, in any placement that may fit."""
        unit_seconds, time = self._unit_seconds(run, overlaps=overlaps), self._models.time
        gathers = {
            self._gather_seconds[number]
            for number in self._constraint.maybe_feasible(run)
            if number in self._gather_seconds
        }
        totals = (tuple(map(add, unit_seconds, seconds)) for seconds in gathers)
        return min((time.on_even_stages_s(total, self._shape.pipeline) for total in totals), default=inf)

    def _evaluate(self, branch: _SearchNode) -> None:
        """Add what fits of one leaf, for all placements and dispatches."""
        run = self._constraint.run(branch.recompute, branch.size, branch.virtual_stages or 1)
        models, options, limit_s = self._models, run.options, self._fastest.limit_of(self._shape)
        unit_seconds = self._unit_seconds(run, overlaps=self._can_overlap(run))
        bound_s = cache(partial(self._placement_bound_s, run, unit_seconds))
        fast = [number for number, gathers in self._gather_seconds.items() if bound_s(gathers) <= limit_s]
        for number in self._constraint.feasible(run, fast):
            degrees, sharding = self._constraint.data_shardings[number]
            plain = Candidate(degrees, replace(options, sharding=sharding))
            if bound_s(self._gather_seconds[number]) + models.time.min_extra_s(plain) > limit_s:
                continue
            for candidate in (plain, *models.choices.dispatches(plain)):
                step_s, not_yet = models.time.step_s(candidate), models.not_yet(candidate)
                if step_s > limit_s or (self._to_run and not_yet):
                    continue
                if candidate.options.overlap == options.overlap or self._constraint.fits(candidate):
                    self._fastest.add(RankedCandidate(candidate, self._shape, step_s, not_yet))
                    limit_s = self._fastest.limit_of(self._shape)

    def _placement_bound_s(self, run: Candidate, unit_seconds: tuple[float, ...], gathers: tuple[float, ...]) -> float:
        """Lower bound of all micro-batches and the bubble, given a placement's gathers."""
        virtual_stages, totals = run.options.virtual_stages, tuple(map(add, unit_seconds, gathers))
        one_s = self._models.time.on_stages_s(totals, PipelineChoices.from_candidate(run))
        return one_s * self._effective_micro_batches(run, virtual_stages)
