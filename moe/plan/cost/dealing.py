"""Units dealt out to pipeline stages on pools of several kinds of devices: to slower stages, or fuller ones, fewer."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import combinations, pairwise
from math import inf
from operator import and_, mul

from moe.plan.cost.stages import Stage
from moe.plan.cost.units import Unit

OfUnits = Sequence[Sequence[float]]
"""Seconds of each kind of unit, on each pool."""
Fits = Callable[[Stage], bool]


class Dealer:
    """Deals a model's units to the stages of a pipeline of which each lies on one pool, in runs of one unit at least.

    `pools`: of each stage, the number of its pool.
    """

    def __init__(self, units: Sequence[Unit], pools: Sequence[int]) -> None:
        self.units, self.pools = tuple(unit.apart for unit in units), tuple(pools)
        """A stage has its own copy of a table that two units share."""
        self.kinds = tuple(dict.fromkeys(self.units))
        """Kinds of units, in order."""
        self.kind_numbers = [self.kinds.index(unit) for unit in self.units]
        self.firsts = [self.units.index(kind) for kind in self.kinds]
        """The first unit of each kind."""
        self.stages_of_pool = Counter(self.pools)
        so_far = [Counter[Unit]()]
        for unit in self.units:
            so_far.append(so_far[-1] + Counter([unit]))
        self._so_far = [tuple(counter[kind] for kind in self.kinds) for counter in so_far]
        self.stage = cache(self._stage)
        self._stages: dict[tuple[int, tuple[int, ...]], Stage] = {}

    def counts(self, start: int, end: int) -> tuple[int, ...]:
        """Units of each kind in a run."""
        pairs = zip(self._so_far[start], self._so_far[end], strict=True)
        return tuple(after - before for before, after in pairs)

    @cached_property
    def run_counts(self) -> list[tuple[int, ...]]:
        """Units of each kind that a run may have."""
        runs = combinations(range(len(self.units) + 1), 2)
        return list(dict.fromkeys(self.counts(*run) for run in runs))

    @cached_property
    def runs(self) -> list[list[int]]:
        """Index into `run_counts` by start and end of a run; -1 if the run is none."""
        numbers, places = (
            {counts: number for number, counts in enumerate(self.run_counts)},
            range(len(self.units) + 1),
        )
        return [[numbers.get(self.counts(start, end), -1) for end in places] for start in places]

    @cached_property
    def whole(self) -> Stage:
        """The last stage, had it all units."""
        return self._stage(len(self.pools) - 1, 0, len(self.units))

    @cached_property
    def single(self) -> list[int]:
        """The number of the run of one unit of each kind."""
        return [self.runs[first][first + 1] for first in self.firsts]

    def stages(self, ends: Sequence[int]) -> tuple[Stage, ...]:
        """The stages whose runs of units end before these."""
        return tuple(self.stage(index, *run) for index, run in enumerate(pairwise((0, *ends))))

    def _stage(self, index: int, start: int, end: int) -> Stage:
        """Stage of a run of units. Equal units give the same object, since caches are keyed by it."""
        counts = self.counts(start, end)
        if (stage := self._stages.get((index, counts))) is None:
            units = tuple((unit, count) for unit, count in zip(self.kinds, counts, strict=True) if count)
            stage = self._stages[index, counts] = Stage(index, units)
        return stage

    def seconds(self, stage: Stage, of_units: OfUnits) -> float:
        """Seconds of a stage's units."""
        of_kind = dict(zip(self.kinds, of_units[self.pools[stage.index]], strict=True))
        return sum(count * of_kind[unit] for unit, count in stage.units)

    def least_s(self, of_units: OfUnits) -> float:
        """Seconds of the slowest stage at least, were units divisible.

        Whatever pools units go to, a pool's stages have `T` seconds each: `Σ_k λ_k p_k T ≥ Σ_u n_u min_k λ_k t_uk` for
        any weights λ of pools. These are the shares of the whole that a second on each pool is.
        """
        counts = self._so_far[-1]
        weights = {pool: 1 / dot(counts, of_units[pool]) for pool in self.stages_of_pool}
        work = sum(
            count * min(weight * of_units[pool][kind] for pool, weight in weights.items())
            for kind, count in enumerate(counts)
        )
        return work / sum(weights[pool] * number for pool, number in self.stages_of_pool.items())

    def can_be_dealt(self, fits: Fits) -> bool:
        """Whether runs of units fit on all stages. A run that is a part of one that fits, fits."""
        return _Deal(self, None, fits).latest(inf) is not None

    def slowest_s(self, of_units: OfUnits) -> float:
        """Seconds of the slowest stage, with memory for anything: as few as can be."""
        return _Deal(self, of_units, None).fastest_s

    def deal(self, of_units: OfUnits, fits: Fits) -> tuple[int, ...] | None:
        """The end of each stage's run: the slowest stage is as fast as can be, and the others as even as units come.
        None where no runs fit. A run that is a part of one that fits, fits."""
        deal = _Deal(self, of_units, fits)
        return None if deal.fastest_s == inf else deal.even(deal.fastest_s)

    @cached_property
    def any_can_follow(self) -> list[list[bool]]:
        """`_Deal._can_follow` where any stage can have any unit: as long as there is one for each."""
        number, stages = len(self.units), len(self.pools)
        return [
            [unit + stages - index <= number for unit in range(number + 1)] for index in range(stages + 1)
        ]


class _Deal:
    """One problem of dealing units to stages: no stage may exceed a number of seconds, or every run must fit."""

    def __init__(self, dealer: Dealer, of_units: OfUnits | None, fits: Fits | None) -> None:
        self._dealer, self._fits, self._number = dealer, fits, len(dealer.units)
        self._runs, self._least_s = dealer.runs, 0.0
        self._seconds: dict[int, list[float]] = {}
        if of_units is not None:
            self._least_s = dealer.least_s(of_units)
            self._seconds = {
                pool: [dot(counts, of_units[pool]) for counts in dealer.run_counts]
                for pool in dealer.stages_of_pool
            }

    @cached_property
    def fastest_s(self) -> float:
        """Seconds of the slowest stage: as few as can be; infinitely many where no runs fit."""
        limits = sorted({seconds for of_pool in self._seconds.values() for seconds in of_pool})
        # The least of them is seldom far beyond the bound: it is looked for in longer and longer strides from there.
        below, stride = bisect_left(limits, self._least_s * (1 - 1e-9)), 1
        place = below
        while place < len(limits) and not self._is_enough(limits[place]):
            below, place, stride = place + 1, place + stride, 2 * stride
        first = bisect_left(limits, True, lo=below, hi=min(place, len(limits)), key=self._is_enough)
        return limits[first] if first < len(limits) else inf

    @cached_property
    def _fit_alone(self) -> list[list[bool]]:
        """Whether one unit of each kind fits, by stage."""
        firsts, indices = self._dealer.firsts, range(len(self._dealer.pools))
        return [[self._may_be(index, first, first + 1, inf) for first in firsts] for index in indices]

    def _is_enough(self, limit_s: float) -> bool:
        return self.latest(limit_s) is not None

    def latest(self, limit_s: float) -> list[int] | None:
        """Ends of runs that are as long as may be, from the first on; None where they leave units over.

        The longer, the better: what follows then has a part of what it had after a shorter run, as long as each stage
        that follows has a unit.
        """
        can_follow, ends, start = self._can_follow(limit_s), [], 0
        if not can_follow[0][0]:
            return None
        for index in range(len(self._dealer.pools)):
            start = self._longest(index, start, self._number, limit_s)
            while not can_follow[index + 1][start]:
                start -= 1
            ends.append(start)
        return ends if start == self._number else None

    def even(self, limit_s: float) -> tuple[int, ...]:
        """Runs within the limit, each as long as an even share of what is left, where the rest allows it."""
        pools, can_follow = self._dealer.pools, self._can_follow(limit_s)
        earliest, ends, start = self._earliest(can_follow, limit_s), [], 0
        for index in range(len(pools) - 1):
            rest, of_pool = self._runs[start][-1], self._seconds[pools[index]]
            each_s = 1 / sum(1 / self._seconds[pool][rest] for pool in pools[index:])
            last_end = self._longest(index, start, self._number, limit_s)
            possible_ends = [
                end
                for end in range(max(start + 1, earliest[index + 1]), last_end + 1)
                if can_follow[index + 1][end]
            ]
            short = (end for end in reversed(possible_ends) if of_pool[self._runs[start][end]] <= each_s)
            ends.append(start := next(short, possible_ends[0]))
        return (*ends, self._number)

    def _may_be(self, index: int, start: int, end: int, limit_s: float) -> bool:
        """Whether a run is short enough for a stage and fits."""
        if limit_s < inf and self._seconds[self._dealer.pools[index]][self._runs[start][end]] > limit_s:
            return False
        return self._fits is None or self._fits(self._dealer.stage(index, start, end))

    def _longest(self, index: int, start: int, last: int, limit_s: float) -> int:
        """End of the longest run from `start` that may be; `start` where none may."""

        def is_too_much(end: int) -> bool:
            return not self._may_be(index, start, end, limit_s)

        return start + bisect_left(range(start + 1, last + 1), True, key=is_too_much)

    def _can_follow(self, limit_s: float) -> Sequence[Sequence[bool]]:
        """Whether a stage and all that follow can have one unit at least each from a unit on, by stage, with one more
        for the end, and by unit."""
        dealer = self._dealer
        short = {
            pool: [limit_s == inf or self._seconds[pool][run] <= limit_s for run in dealer.single]
            for pool in dealer.stages_of_pool
        }
        alone = [
            [*map(and_, short[pool], fitting)]
            for pool, fitting in zip(dealer.pools, self._fit_alone, strict=True)
        ]
        if all(map(all, alone)):
            return dealer.any_can_follow
        can_follow = [[True] * (self._number + 1)]
        for index in reversed(range(len(dealer.pools))):
            after, current, end = can_follow[-1], [False] * (self._number + 1), None
            for start in reversed(range(self._number)):
                if after[start + 1]:
                    end, current[start] = start + 1, alone[index][dealer.kind_numbers[start]]
                elif end is not None:
                    current[start] = self._may_be(index, start, end, limit_s)
            can_follow.append(current)
        return can_follow[::-1]

    def _earliest(self, can_follow: Sequence[Sequence[bool]], limit_s: float) -> list[int]:
        """The first start of each stage's run from which the rest can be dealt: as it can be from any later one that
        leaves each stage a unit."""
        starts = [self._number]
        for index in reversed(range(len(self._dealer.pools))):
            after, first = can_follow[index + 1], starts[-1]
            starts.append(
                next(
                    start
                    for start, can_begin in enumerate(can_follow[index])
                    if can_begin
                    and self._may_be(index, start, after.index(True, max(first, start + 1)), limit_s)
                )
            )
        return starts[::-1]


def dot(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds of so many of each."""
    total: float = sum(map(mul, counts, seconds))
    return total
