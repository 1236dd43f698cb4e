"""The fastest layouts that fit, of all that there is to choose from."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from heapq import heapify, heappop, heapreplace
from math import inf

from moe.plan.candidate import Candidate, Options
from moe.plan.cost.memory import MemoryModel
from moe.plan.cost.time import TimeModel
from moe.plan.degrees import Degrees
from moe.plan.profile import ProfileName
from moe.plan.search.choices import LayoutChoices
from moe.plan.search.memory_constraint import MemoryConstraint, Ways
from moe.plan.search.shape import TIES, Fastest, Models, RankedCandidate, ShapeSearch, StepTimes
from moe.plan.search.spread import NEAR, WITHIN_ERROR, Chosen, SpreadEnd, choose
from moe.spec import JobSpec

_ENDS = ("the least time of the host", "the most time of the host")
"""Names of the ends: most hides behind arithmetic at the first, and least at the second."""
_ROOMS = 1024
"""Shapes whose room in memory is kept for further searches."""
LEAST = 3
"""How many of the fastest are found at least, of all and of those that can be run: what is chosen among, and what
`auto: measured` measures."""


@dataclass(frozen=True)
class Ranking:
    """Result of a search."""

    fitting: list[RankedCandidate]
    """The fastest first: one of each shape, and behind them more of the same where there are too few shapes."""
    num_shapes: int
    num_too_slow: int
    """Shapes that could not be among the fastest whatever else is chosen."""

    @property
    def runnable(self) -> list[RankedCandidate]:
        return [entry for entry in self.fitting if not entry.not_yet]


class Ranker:
    """Ranks the layouts of one job on one cluster.

    What is bound to take the least is looked into first, of all shapes, sizes of micro-batches and virtual stages.
    Where the bound of all that is left says that it is none of the fastest, the search ends: so what comes out is what
    trying every choice would give.
    """

    def __init__(
        self,
        spec: JobSpec,
        profile: ProfileName,
        choices: LayoutChoices,
        time: StepTimes,
        room_of: Callable[[Degrees], Ways],
    ) -> None:
        self._models = Models(spec, profile, choices, time, lru_cache(_ROOMS)(room_of))

    @classmethod
    def of_one_kind(
        cls, spec: JobSpec, limit_bytes: int, choices: LayoutChoices, memory: MemoryModel, time: TimeModel
    ) -> "Ranker":
        """A ranker on devices of one kind."""
        return cls(
            spec, memory.profile.name, choices, time, partial(MemoryConstraint, choices, memory, limit_bytes)
        )

    def priced_by(self, time: StepTimes) -> "Ranker":
        """A ranker of the same job by another time."""
        ranker = copy(self)
        ranker._models = replace(self._models, time=time)
        return ranker

    def rank(self, shapes: Sequence[Degrees], top: int) -> Ranking:
        """The fastest of `top` shapes, `LEAST` at least, and of as many that can be run, or as many of fewer shapes."""
        number = max(top, LEAST)
        of_any, to_run = Fastest(number), Fastest(number)
        self._search(shapes, of_any)
        self._search(shapes, to_run, to_run=True)
        leading, extra = [*of_any.entries, *to_run.entries], []
        for leaders, only_to_run in ((of_any.entries, False), (to_run.entries, True)):
            if len(leaders) < number:
                extra += [
                    entry
                    for first in leaders
                    for entry in self._fastest(first.shape, number, to_run=only_to_run)
                ]
        fitting = {
            entry.candidate: entry
            for part in (leading, extra)
            for entry in sorted(part, key=lambda entry: entry.order)
        }
        too_slow = sum(self._shown_bound_s(shape) > of_any.limit_s for shape in shapes)
        return Ranking(list(fitting.values()), len(shapes), too_slow)

    def fastest(
        self, shapes: Sequence[Degrees], at_most_s: float = inf, *, to_run: bool = False
    ) -> RankedCandidate | None:
        """The fastest of those that take `at_most_s`, where they are wanted `to_run`, of those that can be run; None
        where there is none."""
        best = Fastest(1, at_most_s=at_most_s * TIES)
        self._search(shapes, best, to_run=to_run)
        return next(iter(best.entries), None)

    def under_both(
        self, ranking: Ranking, shapes: Sequence[Degrees], times: Sequence[StepTimes]
    ) -> tuple[Chosen, list[SpreadEnd]]:
        """The layout that is chosen of those that can be run, or of all where none can be, and the ends of the
        software's spread, whose `times` these are."""
        entries = ranking.runnable or ranking.fitting
        first, step_s, to_run = entries[0].candidate, self._models.time.step_s, bool(ranking.runnable)

        def fastest(time: StepTimes) -> Candidate | None:
            """The fastest where it is faster than the first of all by more than a little."""
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
        return choose(
            [first, *(candidate for candidate in by_speed if candidate != first)], step_s, ends
        ), ends

    def _simpler(self, first: Candidate, shapes: Sequence[Degrees], *, to_run: bool) -> Iterator[Candidate]:
        """The fastest that split along each smaller number of axes, as far as they are within the error."""
        limit_s = self._models.time.step_s(first) * WITHIN_ERROR
        for number in range(first.degrees.num_further_axes):
            alike = [shape for shape in shapes if shape.num_further_axes == number]
            if alike and (entry := self.fastest(alike, limit_s, to_run=to_run)) is not None:
                yield entry.candidate

    def _fastest(self, shape: Degrees, number: int, *, to_run: bool = False) -> list[RankedCandidate]:
        """The `number` fastest of one shape, the fastest first."""
        best = Fastest(number, one_of_each=False)
        self._search([shape], best, to_run=to_run)
        return best.entries

    def _search(self, shapes: Iterable[Degrees], fastest: Fastest, *, to_run: bool = False) -> None:
        """Adds the fastest that fit of all shapes; where they are wanted `to_run`, of those that can be run."""
        waiting = []
        for number, shape in enumerate(shapes):
            if not (to_run and self._models.not_yet(Candidate(shape))):
                bound_s = self.bound_s(shape)
                steps = ShapeSearch(self._models, shape, bound_s, fastest, to_run=to_run).steps()
                waiting.append((bound_s, number, steps))
        heapify(waiting)
        while waiting and waiting[0][0] <= fastest.limit_s:
            _, number, steps = waiting[0]
            if (next_s := next(steps, None)) is None:
                heappop(waiting)
            else:
                heapreplace(waiting, (next_s, number, steps))

    def bound_s(self, shape: Degrees) -> float:
        """Seconds that a step of the shape takes at least: no group takes less than all of them at once, with nothing
        sharded or recomputed."""
        whole, ranks_per_node = self._whole(shape)
        of_units = self._models.time.least_of_units(whole, ranks_per_node)
        one_s = (
            self._models.time.on_even_stages_s(of_units, shape.pipeline) / whole.options.micro_batch_groups
        )
        smallest, _ = self._models.choices.micro_batches(shape)[-1]
        return one_s * self._models.least_groups(shape, smallest)

    def _shown_bound_s(self, shape: Degrees) -> float:
        """Lower bound of the step without a pipeline's bubble, in the digits that are shown."""
        return float(f"{self._models.time.bound_s(*self._whole(shape)):.6g}")

    def _whole(self, shape: Degrees) -> tuple[Candidate, int | None]:
        whole = Candidate(shape, Options(micro_batch_groups=self._models.groups(shape)))
        return whole, self._models.choices.ranks_per_node(shape)
