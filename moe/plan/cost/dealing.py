"""Assignment of units to pipeline stages on different devices: slower or fuller stages get fewer."""

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
"""Seconds of each kind of unit, by pool."""
Fits = Callable[[Stage], bool]


class Dealer:
    """Assigns runs of consecutive units, at least one each, to pipeline stages. `pools`: pool index of each stage."""

    def __init__(self, units: Sequence[Unit], pools: Sequence[int]) -> None:
        self.units, self.pools = tuple(unit.apart for unit in units), tuple(pools)
        """A stage has its own copy of a table that two units share."""
        self.kinds = tuple(dict.fromkeys(self.units))
        """Distinct units, in order."""
        self.kind_numbers = [self.kinds.index(unit) for unit in self.units]
        self.firsts = [self.units.index(kind) for kind in self.kinds]
        """Index of the first unit of each kind."""
        self.stages_of_pool = Counter(self.pools)
        so_far = [Counter[Unit]()]
        for unit in self.units:
            so_far.append(so_far[-1] + Counter([unit]))
        self._so_far = [tuple(counter[kind] for kind in self.kinds) for counter in so_far]
        self.stage = cache(self._stage)
        self._stages: dict[tuple[int, tuple[int, ...]], Stage] = {}

    def counts(self, start: int, end: int) -> tuple[int, ...]:
        pairs = zip(self._so_far[start], self._so_far[end], strict=True)
        return tuple(after - before for before, after in pairs)

    @cached_property
    def run_counts(self) -> list[tuple[int, ...]]:
        """Distinct unit counts by kind of all possible runs."""
        runs = combinations(range(len(self.units) + 1), 2)
        return list(dict.fromkeys(self.counts(*run) for run in runs))

    @cached_property
    def runs(self) -> list[list[int]]:
        """Index into `run_counts` by start and end; -1 for no run."""
        numbers, places = (
            {counts: number for number, counts in enumerate(self.run_counts)},
            range(len(self.units) + 1),
        )
        return [[numbers.get(self.counts(start, end), -1) for end in places] for start in places]

    @cached_property
    def whole(self) -> Stage:
        """The last stage with all units."""
        return self._stage(len(self.pools) - 1, 0, len(self.units))

    @cached_property
    def single(self) -> list[int]:
        """Index into `run_counts` of a run of one unit, by kind."""
        return [self.runs[first][first + 1] for first in self.firsts]

    def stages(self, ends: Sequence[int]) -> tuple[Stage, ...]:
        """Return the stages whose runs end before `ends`."""
        return tuple(self.stage(index, *run) for index, run in enumerate(pairwise((0, *ends))))

    def _stage(self, index: int, start: int, end: int) -> Stage:
        """Return one object for equal units: caches are keyed by stage."""
        counts = self.counts(start, end)
        if (stage := self._stages.get((index, counts))) is None:
            units = tuple((unit, count) for unit, count in zip(self.kinds, counts, strict=True) if count)
            stage = self._stages[index, counts] = Stage(index, units)
        return stage

    def seconds(self, stage: Stage, of_units: OfUnits) -> float:
        of_kind = dict(zip(self.kinds, of_units[self.pools[stage.index]], strict=True))
        return sum(count * of_kind[unit] for unit, count in stage.units)

    def least_s(self, of_units: OfUnits) -> float:
        """Lower bound of the slowest stage's seconds, with divisible units.

        Each stage has at most `T` seconds, so `Σ_k λ_k p_k T ≥ Σ_u n_u min_k λ_k t_uk` for any pool weights λ; here
        the share of the whole model that a pool computes in a second.
        """
        counts = self._so_far[-1]
        weights = {pool: 1 / dot(counts, of_units[pool]) for pool in self.stages_of_pool}
        work = sum(
            count * min(weight * of_units[pool][kind] for pool, weight in weights.items())
            for kind, count in enumerate(counts)
        )
        return work / sum(weights[pool] * number for pool, number in self.stages_of_pool.items())

    def can_be_dealt(self, fits: Fits) -> bool:
        """Whether some assignment fits all stages; `fits` must hold for parts of a run that fits."""
        return _Deal(self, None, fits).latest(inf) is not None

    def slowest_s(self, of_units: OfUnits) -> float:
        """Least seconds of the slowest stage, ignoring memory."""
        return _Deal(self, of_units, None).fastest_s

    def deal(self, of_units: OfUnits, fits: Fits) -> tuple[int, ...] | None:
        """Return the end of each stage's run: the slowest stage as fast as possible, the others as even as possible;
        None if nothing fits. `fits` must hold for parts of a run that fits."""
        deal = _Deal(self, of_units, fits)
        return None if deal.fastest_s == inf else deal.even(deal.fastest_s)

    @cached_property
    def any_can_follow(self) -> list[list[bool]]:
        """`_Deal._can_follow` if any stage can have any unit."""
        number, stages = len(self.units), len(self.pools)
        return [
            [unit + stages - index <= number for unit in range(number + 1)] for index in range(stages + 1)
        ]


class _Deal:
    """One assignment problem: unit seconds to balance, a predicate to fit, or both."""

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
        limits = sorted({seconds for of_pool in self._seconds.values() for seconds in of_pool})
        # The solution is usually close to the lower bound: galloping search from there.
        below, stride = bisect_left(limits, self._least_s * (1 - 1e-9)), 1
        place = below
        while place < len(limits) and not self._is_enough(limits[place]):
            below, place, stride = place + 1, place + stride, 2 * stride
        first = bisect_left(limits, True, lo=below, hi=min(place, len(limits)), key=self._is_enough)
        return limits[first] if first < len(limits) else inf

    @cached_property
    def _fit_alone(self) -> list[list[bool]]:
        firsts, indices = self._dealer.firsts, range(len(self._dealer.pools))
        return [[self._may_be(index, first, first + 1, inf) for first in firsts] for index in indices]

    def _is_enough(self, limit_s: float) -> bool:
        return self.latest(limit_s) is not None

    def latest(self, limit_s: float) -> list[int] | None:
        """Return the ends of the longest runs within the limit; None if units are left over.

        Greedy is optimal: a longer run leaves later stages a part of what they would have had.
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
        """Return the ends of runs within the limit, each the longest within an even share of the remaining work, if
        possible."""
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
        if limit_s < inf and self._seconds[self._dealer.pools[index]][self._runs[start][end]] > limit_s:
            return False
        return self._fits is None or self._fits(self._dealer.stage(index, start, end))

    def _longest(self, index: int, start: int, last: int, limit_s: float) -> int:
        """End of the longest possible run from `start`; `start` if none."""

        def is_too_much(end: int) -> bool:
            return not self._may_be(index, start, end, limit_s)

        return start + bisect_left(range(start + 1, last + 1), True, key=is_too_much)

    def _can_follow(self, limit_s: float) -> Sequence[Sequence[bool]]:
        """Whether each stage from this one on can have a unit, starting from this unit: by stage (and one past the
        last), by unit."""
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
        """Each stage's first start from which the rest can be assigned; later starts work too while each stage has a
        unit."""
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
    """Return the sum of count times seconds."""
    total: float = sum(map(mul, counts, seconds))
    return total
