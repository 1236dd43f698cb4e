"""Ranking of the fastest layouts that fit."""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from heapq import heapify, heappop, heapreplace
from math import inf

from moe.plan.candidate import Candidate, Options
from moe.plan.cost.memory import MemoryModel
from moe.plan.cost.time import TimeModel
from moe.plan.degrees import Degrees
from moe.plan.search.choices import LayoutChoices
from moe.plan.search.memory_constraint import MemoryConstraint
from moe.plan.search.shape import TIES, Fastest, Models, RankedCandidate, ShapeSearch
from moe.plan.search.spread import NEAR, WITHIN_ERROR, LayoutChoice, SpreadEnd, choose
from moe.spec import JobSpec

_ENDS = ("the lowest host time", "the highest host time")
"""Most communication is overlapped at the first end, least at the second."""
_MAX_CONSTRAINTS = 1024
LEAST = 3
"""Fewest layouts found, of all and of runnable ones: the choice is among them, and `auto: measured` measures them."""


@dataclass(frozen=True)
class Ranking:
    """Result of a search."""

    fitting: list[RankedCandidate]
    """The fastest first, one per shape; then more of the same if shapes are few."""
    num_shapes: int
    num_too_slow: int
    """Shapes whose lower bound exceeds the slowest of the fastest."""

    @property
    def runnable(self) -> list[RankedCandidate]:
        return [entry for entry in self.fitting if not entry.not_yet]


class Ranker:
    """Ranks the layouts of one job on one cluster.

    Best-first branch and bound over shapes, micro-batch sizes and virtual stages; it ends when all remaining lower
    bounds exceed the fastest found. The result equals exhaustive enumeration.
    """

    def __init__(
        self, spec: JobSpec, limit_bytes: int, choices: LayoutChoices, memory: MemoryModel, time: TimeModel
    ) -> None:
        constraint_of = lru_cache(_MAX_CONSTRAINTS)(partial(MemoryConstraint, choices, memory, limit_bytes))
        self._models = Models(spec, memory.profile.name, choices, time, constraint_of)

    def priced_by(self, time: TimeModel) -> "Ranker":
        """Ranker with another time model."""
        ranker = copy(self)
        ranker._models = replace(self._models, time=time)
        return ranker

    def rank(self, shapes: Sequence[Degrees], top: int) -> Ranking:
        """The fastest of `top` shapes (at least `LEAST`), and as many runnable ones; several per shape if shapes are
        few."""
        number = max(top, LEAST)
        any_layout, to_run = Fastest(number), Fastest(number)
        self._search(shapes, any_layout)
        self._search(shapes, to_run, to_run=True)
        leading, extra = [*any_layout.entries, *to_run.entries], []
        for leaders, only_to_run in ((any_layout.entries, False), (to_run.entries, True)):
            if len(leaders) < number:
                extra += [
                    entry for first in leaders for entry in self._fastest(first.shape, number, to_run=only_to_run)
                ]
        fitting = {
            entry.candidate: entry for part in (leading, extra) for entry in sorted(part, key=lambda entry: entry.order)
        }
        too_slow = sum(self._shown_bound_s(shape) > any_layout.limit_s for shape in shapes)
        return Ranking(list(fitting.values()), len(shapes), too_slow)

    def fastest(self, shapes: Sequence[Degrees], max_s: float = inf, *, to_run: bool = False) -> RankedCandidate | None:
        """The fastest within `max_s`; with `to_run`, of runnable ones. None if there is none."""
        best = Fastest(1, max_s=max_s * TIES)
        self._search(shapes, best, to_run=to_run)
        return next(iter(best.entries), None)

    def choose_at_ends(
        self, ranking: Ranking, shapes: Sequence[Degrees], times: Sequence[TimeModel]
    ) -> tuple[LayoutChoice, list[SpreadEnd]]:
        """Return the choice (runnable if any is) and the ends of the software's spread, whose time models are
        `times`."""
        entries = ranking.runnable or ranking.fitting
        first, step_s, to_run = entries[0].candidate, self._models.time.step_s, bool(ranking.runnable)

        def fastest(time: TimeModel) -> Candidate | None:
            """The fastest at an end, if it beats the first by more than `NEAR`."""
            entry = self.priced_by(time).fastest(shapes, time.step_s(first) / NEAR, to_run=to_run)
            return None if entry is None else entry.candidate

        ends = [
            SpreadEnd(name, cache(time.step_s), fastest(time) or first)
            for name, time in zip(_ENDS, times, strict=False)
        ]
        simpler = self._simpler(first, shapes, to_run=to_run)
        candidates = dict.fromkeys(
            [*simpler, *(entry.candidate for entry in entries[:LEAST]), *(end.fastest for end in ends)]
        )
        by_speed = sorted(candidates, key=lambda candidate: (candidate != first, step_s(candidate)))
        return choose([first, *(candidate for candidate in by_speed if candidate != first)], step_s, ends), ends

    def _simpler(self, first: Candidate, shapes: Sequence[Degrees], *, to_run: bool) -> Iterator[Candidate]:
        """The fastest for each smaller number of split axes, if within the prediction error."""
        limit_s = self._models.time.step_s(first) * WITHIN_ERROR
        for number in range(first.degrees.num_further_axes):
            similar_shapes = [shape for shape in shapes if shape.num_further_axes == number]
            if similar_shapes and (entry := self.fastest(similar_shapes, limit_s, to_run=to_run)) is not None:
                yield entry.candidate

    def _fastest(self, shape: Degrees, number: int, *, to_run: bool = False) -> list[RankedCandidate]:
        best = Fastest(number, one_of_each=False)
        self._search([shape], best, to_run=to_run)
        return best.entries

    def _search(self, shapes: Iterable[Degrees], fastest: Fastest, *, to_run: bool = False) -> None:
        """Add the fastest that fit, over all shapes."""
        queue = []
        for number, shape in enumerate(shapes):
            if not (to_run and self._models.not_yet(Candidate(shape))):
                bound_s = self.bound_s(shape)
                steps = ShapeSearch(self._models, shape, bound_s, fastest, to_run=to_run).steps()
                queue.append((bound_s, number, steps))
        heapify(queue)
        while queue and queue[0][0] <= fastest.limit_s:
            _, number, steps = queue[0]
            if (next_s := next(steps, None)) is None:
                heappop(queue)
            else:
                heapreplace(queue, (next_s, number, steps))

    def bound_s(self, shape: Degrees) -> float:
        """Lower bound of the step time: a token group is fastest in one micro-batch of all, without sharding or
        recomputation."""
        candidate, ranks_per_node = self._best_case(shape)
        unit_seconds = self._models.time.min_unit_seconds(candidate, ranks_per_node)
        one_s = self._models.time.on_even_stages_s(unit_seconds, shape.pipeline) / candidate.options.micro_batch_groups
        smallest, _ = self._models.choices.micro_batches(shape)[-1]
        return one_s * self._models.min_groups(shape, smallest)

    def _shown_bound_s(self, shape: Degrees) -> float:
        """Lower bound without a pipeline bubble, rounded as shown."""
        return float(f"{self._models.time.bound_s(*self._best_case(shape)):.6g}")

    def _best_case(self, shape: Degrees) -> tuple[Candidate, int | None]:
        candidate = Candidate(shape, Options(micro_batch_groups=self._models.groups(shape)))
        return candidate, self._models.choices.ranks_per_node(shape)
