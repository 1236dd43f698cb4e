"""The fastest layouts that fit, of all that there is to choose from."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from operator import add

from moe.plan.candidate import Candidate, Options, Recompute, Sharding
from moe.plan.cost.memory import MemoryModel, Placed
from moe.plan.cost.time import TimeModel
from moe.plan.degrees import Degrees
from moe.plan.executable import not_yet
from moe.plan.search.choices import Choices
from moe.spec import JobSpec

RUNNABLE = 3
"""Of those that can be run, how many of the fastest are found at least: those that `auto: measured` measures."""
_TIES = 1 + 1e-5
"""Seconds are told apart by six digits: what is this much slower may be shown as fast."""


@dataclass(frozen=True)
class Ranked:
    """A candidate that fits."""

    candidate: Candidate
    shape: Degrees
    step_s: float
    not_yet: tuple[str, ...]

    @property
    def order(self) -> tuple[object, ...]:
        """By the time that is shown, then by what decides between equals."""
        return (float(f"{self.step_s:.6g}"), *self.candidate.key)


@dataclass(frozen=True)
class Ranking:
    """Result of a search."""

    fitting: list[Ranked]
    """The fastest first: one of each shape, and behind them more of the same where there are too few shapes."""
    num_shapes: int
    num_too_slow: int
    """Shapes that could not be among the fastest whatever else is chosen."""

    @property
    def runnable(self) -> list[Ranked]:
        return [each for each in self.fitting if not each.not_yet]


@dataclass
class _Fastest:
    """The `number` fastest of what was added."""

    number: int
    at_most_s: float = inf
    found: list[Ranked] = field(default_factory=list)
    limit_s: float = field(init=False)
    """Longest step of these."""

    def __post_init__(self) -> None:
        self.limit_s = self.at_most_s

    def add(self, ranked: Ranked) -> None:
        insort(self.found, ranked, key=lambda each: each.order)
        del self.found[self.number :]
        if len(self.found) == self.number:
            self.limit_s = min(self.at_most_s, self.found[-1].step_s * _TIES)


class Ranker:
    """Ranks the layouts of one job on one cluster.

    Shapes, and sizes of micro-batches within them, are passed over where a bound, the least that a step could take
    there, says that they are none of the fastest: so what comes out is what trying every choice would give.
    """

    def __init__(
        self, spec: JobSpec, limit_bytes: int, choices: Choices, memory: MemoryModel, time: TimeModel
    ) -> None:
        self._spec, self._limit_bytes, self._usable_bytes = spec, limit_bytes, limit_bytes - memory.allowance
        self._choices, self._memory, self._time = choices, memory, time

    def rank(self, shapes: Sequence[Degrees], top: int) -> Ranking:
        """The fastest of `top` shapes, and of `RUNNABLE` that can be run, or as many of fewer shapes."""
        bounds = sorted((self._shown_bound_s(shape), shape.order, shape) for shape in shapes)
        of_any, to_run = _Fastest(top), _Fastest(max(top, RUNNABLE))
        for bound_s, _, shape in bounds:
            if bound_s <= of_any.limit_s:
                for each in self._fastest(shape, 1, of_any.limit_s):
                    of_any.add(each)
            if bound_s <= to_run.limit_s and not self._not_yet(Candidate(shape)):
                for each in self._fastest(shape, 1, to_run.limit_s, to_run=True):
                    to_run.add(each)
        leading, more = [*of_any.found, *to_run.found], []
        if len(of_any.found) < of_any.number:
            more += [each for first in of_any.found for each in self._fastest(first.shape, top)]
        if len(to_run.found) < to_run.number:
            more += [
                each
                for first in to_run.found
                for each in self._fastest(first.shape, to_run.number, to_run=True)
            ]
        fitting = {
            each.candidate: each
            for part in (leading, more)
            for each in sorted(part, key=lambda each: each.order)
        }
        too_slow = sum(bound_s > of_any.limit_s for bound_s, _, _ in bounds)
        return Ranking(list(fitting.values()), len(shapes), too_slow)

    def _shown_bound_s(self, shape: Degrees) -> float:
        """Seconds that a step of the shape takes at least: all groups at once, nothing sharded or recomputed. To six
        digits, so that last bits decide no order."""
        whole = Candidate(shape, Options(micro_batch_groups=-(-self._spec.num_groups // shape.data_ranks)))
        return float(f"{self._time.bound_s(whole, self._choices.ranks_per_node(shape)):.6g}")

    def _fastest(
        self, shape: Degrees, number: int, at_most_s: float = inf, *, to_run: bool = False
    ) -> list[Ranked]:
        """The `number` fastest of a shape that fit, the fastest first: of those that take `at_most_s`, and where they
        are wanted `to_run`, of those that can be run."""
        found = _Fastest(number, at_most_s)
        placed = [
            (degrees, sharding) for degrees, sharding in self._choices.placed(shape)
            if not (to_run and self._not_yet(Candidate(degrees, Options(sharding=sharding))))
        ]  # fmt: skip
        if not placed:
            return []
        least_state = cache(partial(self._least_state, placed))
        ranks_per_node = self._choices.ranks_per_node(shape)
        for bound_s, _, run in self._runs(shape, ranks_per_node, at_most_s):
            if bound_s > found.limit_s:
                break
            beside = self._memory.beside_state(run)
            if (
                max(map(add, least_state(run.options.recompute, run.options.virtual_stages), beside))
                > self._usable_bytes
            ):
                continue
            for degrees, sharding in placed:
                placement = Placed.of(degrees, sharding, run.options.recompute)
                state = self._memory.of_state(placement, run.options.virtual_stages)
                if max(map(add, state, beside)) > self._usable_bytes:
                    continue
                plain = Candidate(degrees, replace(run.options, sharding=sharding))
                if plain.gathers and self._bound_s(plain, ranks_per_node) > found.limit_s:
                    continue
                for each in (plain, *self._choices.dispatches(plain)):
                    step_s, blocked = self._time.step_s(each), self._not_yet(each)
                    if step_s > found.limit_s or (to_run and blocked):
                        continue
                    if (
                        each.options.overlap == plain.options.overlap
                        or self._memory.total(each) <= self._limit_bytes
                    ):
                        found.add(Ranked(each, shape, step_s, blocked))
        return found.found

    def _not_yet(self, candidate: Candidate) -> tuple[str, ...]:
        return not_yet(self._spec, candidate, self._memory.profile.name)

    def _least_state(
        self, placed: list[tuple[Degrees, Sharding]], recompute: Recompute, virtual_stages: int
    ) -> tuple[int, ...]:
        """Bytes of each stage's state, wherever it takes the least."""
        every = [self._memory.of_state(Placed.of(*each, recompute), virtual_stages) for each in placed]
        return tuple(map(min, zip(*every, strict=True)))

    def _runs(
        self, shape: Degrees, ranks_per_node: int | None, limit_s: float
    ) -> list[tuple[float, int, Candidate]]:
        """(seconds that it takes at least, a number, a way to run the shape, however it is placed and rows travel), the
        most promising first."""
        found: list[tuple[float, int, Candidate]] = []
        plain, groups = self._choices.plain(shape), -(-self._spec.num_groups // shape.data_ranks)
        for recompute in self._choices.recomputes():
            for size, times in self._choices.micro_batches(shape):
                run = plain.having(micro_batch_groups=size, num_micro_batches=times, recompute=recompute)
                one_s = self._time.bound_s(run, ranks_per_node)
                if one_s * groups / size > limit_s:
                    break  # a group takes no less in a smaller micro-batch
                for virtual_stages in self._choices.virtual_stages(shape.pipeline):
                    bound_s = one_s * (times + (shape.pipeline - 1) / virtual_stages)
                    found.append((bound_s, len(found), run.having(virtual_stages=virtual_stages)))
        return sorted(found)

    def _bound_s(self, candidate: Candidate, ranks_per_node: int | None) -> float:
        """Seconds that a step takes at least, however rows travel."""
        bubbles = (candidate.degrees.pipeline - 1) / candidate.options.virtual_stages
        return self._time.bound_s(candidate, ranks_per_node) * (candidate.options.num_micro_batches + bubbles)
