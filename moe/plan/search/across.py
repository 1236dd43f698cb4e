"""Search for plans whose pipeline stages span several pools."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, permutations
from math import gcd, inf, lcm
from typing import NamedTuple

from moe.plan.candidate import Candidate, Recompute
from moe.plan.cluster.cluster import Cluster
from moe.plan.cluster.pools import Between, Pool
from moe.plan.cost.across import AcrossMemory, AcrossTime
from moe.plan.cost.dealing import Dealer
from moe.plan.cost.time import TimeModel
from moe.plan.cost.units import units
from moe.plan.degrees import Degrees
from moe.plan.goal import Goal, effort
from moe.plan.money import money_of
from moe.plan.plan import Plan, StagePlace
from moe.plan.plan_file import made_across
from moe.plan.search.choices import LayoutChoices, divisors, steps
from moe.plan.search.explain import (  # fmt: skip
    blocks_of,
    number_of,
    of_fused,
    priced_by,
    reasons_for,
    runner_up,
    seconds_of,
)
from moe.plan.search.memory_constraint import Ways
from moe.plan.search.ranking import Ranker
from moe.plan.search.search import LayoutSearch
from moe.spec import JobSpec

MOST_POOLS = 3
"""Most pools of one kind that stages may span; those with the highest FLOP/s are tried."""


class PoolSplit(NamedTuple):
    """Assignment of pipeline stages to pools."""

    pools: tuple[int, ...]
    """Pool indices, in stage order."""
    stages: tuple[int, ...]
    """Number of stages on each of these pools."""
    stage_workers: int

    @property
    def pipeline(self) -> int:
        return sum(self.stages)

    @property
    def num_workers(self) -> int:
        return self.pipeline * self.stage_workers

    @property
    def of_stages(self) -> tuple[int, ...]:
        return tuple(
            pool for pool, number in zip(self.pools, self.stages, strict=True) for _ in range(number)
        )


class _PoolWays(Ways):
    """Layouts of a shape on several pools, and which fit."""

    def __init__(self, choices: LayoutChoices, memory: AcrossMemory, shape: Degrees) -> None:
        super().__init__(choices, shape)
        self._memory = memory
        self._with_room = cache(self._placements_of)

    @property
    def largest(self) -> list[tuple[Recompute, int]]:
        """Memory is checked later, only for candidates that are fast enough."""
        return [(recompute, 0) for recompute in self._choices.recomputes()]

    def maybe_feasible(self, run: Candidate) -> Iterable[int]:
        """All placements if the smallest micro-batches, which take the least memory, fit in one; else none."""
        return self._with_room(run.options.recompute)

    def _placements_of(self, recompute: Recompute) -> range:
        numbers = range(len(self.data_shardings))
        smallest = self.run(recompute, len(self.sizes) - 1)
        return numbers if any(True for _ in self.feasible(smallest, numbers)) else numbers[:0]

    def feasible(self, run: Candidate, numbers: Iterable[int]) -> Iterator[int]:
        for number in numbers:
            degrees, sharding = self.data_shardings[number]
            if self._memory.fits(Candidate(degrees, replace(run.options, sharding=sharding))):
                yield number

    def fits(self, candidate: Candidate) -> bool:
        return self._memory.fits(candidate)


@dataclass(frozen=True)
class SplitResult:
    """The fastest candidate on one split."""

    split: PoolSplit
    candidate: Candidate
    step_s: float


class OnSplit:
    """Cost models and ranker of a job on one split."""

    def __init__(
        self,
        spec: JobSpec,
        pools: Sequence[Pool],
        searches: Sequence[LayoutSearch],
        between: Between,
        split: PoolSplit,
    ) -> None:
        self.split, self._searches, self._between = split, searches, between
        first = searches[split.pools[0]]
        self.dealer = Dealer(units(spec.model, first.profile, spec.train.freeze), split.of_stages)
        self.memory = AcrossMemory([search.memory for search in searches], self.dealer)
        self.time = self._priced_by([search.time for search in searches])
        update = {"virtual_stages": 1, "pipeline": split.pipeline}
        pipeline_spec = spec.model_copy(update={"parallel": spec.parallel.model_copy(update=update)})
        self.cluster = narrowest([pools[pool].cluster for pool in split.pools])
        choices = LayoutChoices(pipeline_spec, self.cluster)
        self.shapes = [
            shape
            for shape in choices.shapes(split.num_workers)
            if choices.fits_nodes(shape)
            and any(True for _ in choices.data_shardings(shape))
            and self.memory.may_hold(shape)
        ]
        self.ranker = Ranker(
            pipeline_spec,
            first.profile.name,
            choices,
            self.time,
            lambda shape: _PoolWays(choices, self.memory, shape),
        )

    def _priced_by(self, models: Sequence[TimeModel]) -> AcrossTime:
        return AcrossTime(models, self.dealer, self._between, self.memory)

    @property
    def bound_s(self) -> float:
        """Lower bound of the step time; infinite without degrees."""
        return min(map(self.ranker.bound_s, self.shapes), default=inf)

    def times_at_ends(self) -> list[AcrossTime]:
        times_of_pool = {pool: self._searches[pool].times_at_ends() for pool in self.split.pools}
        usual = [search.time for search in self._searches]
        return [
            self._priced_by(
                [
                    times_of_pool[pool][end] if pool in times_of_pool else time
                    for pool, time in enumerate(usual)
                ]
            )
            for end in range(min(map(len, times_of_pool.values())))
        ]


class Across:
    """Searches layouts of one job with stages on several pools.

    `searches`: one per pool. A stage has part of a node or whole nodes, in all pools, and one run of layers.
    """

    def __init__(
        self, spec: JobSpec, pools: Sequence[Pool], searches: Sequence[LayoutSearch], between: Between
    ) -> None:
        self._spec, self._pools, self._searches, self._between = spec, pools, searches, between
        self._num_units = sum(1 for _ in spec.model.blocks())
        self._bounds: dict[tuple[int, frozenset[tuple[int, int]]], float] = {}
        self.on = cache(self._on)

    def fastest(
        self, num_workers: int | None, goal: Goal | None, less_than: float = inf
    ) -> SplitResult | None:
        """Best result of all splits by the goal (default: fastest) with an objective below `less_than`; None if
        there is none."""
        best = None
        bounds = [
            (self.effort(split, self._bound_s(split), goal), split)
            for split in self.splits(num_workers, goal)
        ]
        for least_effort, split in sorted(bounds):
            if least_effort >= less_than:
                break
            on = self.on(split)
            winner = on.ranker.fastest(on.shapes, less_than / self.effort(split, 1.0, goal))
            if winner is not None and (of := self.effort(split, winner.step_s, goal)) < less_than:
                best, less_than = SplitResult(split, winner.candidate, winner.step_s), of
        return best

    def _bound_s(self, split: PoolSplit) -> float:
        """Lower bound of the step time, the same for any order of the pools."""
        key = (split.stage_workers, frozenset(zip(split.pools, split.stages, strict=True)))
        if (bound_s := self._bounds.get(key)) is None:
            bound_s = self._bounds[key] = self.on(split).bound_s
        return bound_s

    def effort(self, split: PoolSplit, step_s: float, goal: Goal | None) -> float:
        """The goal's objective, as `moe.plan.goal.effort`."""
        return effort(goal or "time", self._billed_devices(split), step_s, self.price(split))

    def splits(self, num_workers: int | None, goal: Goal | None = None) -> Iterator[PoolSplit]:
        """Yield splits over `num_workers`, or the most of the job's range with enough stages; with a goal, fewer
        too. None for virtual stages, or overlap, which needs them."""
        resources, parallel = self._spec.resources, self._spec.parallel
        if (parallel.virtual_stages or 1) > 1 or parallel.overlap:
            return
        min_workers, max_workers = resources.min_num_workers, resources.max_num_workers
        if num_workers is not None:
            min_workers = max_workers = num_workers
        by_kind: dict[str, list[int]] = {}
        for pool in sorted(range(len(self._pools)), key=self._flops_per_s, reverse=True):
            by_kind.setdefault(self._pools[pool].cluster.traits.kind, []).append(pool)
        for of_kind in by_kind.values():  # stages must run on devices of the same kind
            largest = sorted(of_kind[:MOST_POOLS], key=self._memory_bytes)
            for number in range(2, len(largest) + 1):
                for pools in combinations(largest, number):
                    yield from self._splits_of(pools, min_workers, max_workers, goal)
                    yield from self._splits_of(pools[::-1], min_workers, max_workers, goal)

    def _memory_bytes(self, pool: int) -> int:
        return self._pools[pool].cluster.memory_bytes

    def _flops_per_s(self, pool: int) -> float:
        cluster = self._pools[pool].cluster
        return cluster.num_devices * cluster.traits.kernels.products[self._spec.train.dtype].flops_per_s

    def _splits_of(
        self, pools: tuple[int, ...], min_workers: int, max_workers: int, goal: Goal | None
    ) -> Iterator[PoolSplit]:
        clusters = [self._pools[pool].cluster for pool in pools]
        for stage_workers in self._sizes(clusters, min_workers, max_workers):
            rooms = [cluster.num_devices // stage_workers for cluster in clusters]
            limit = min(sum(rooms), self._num_units, max_workers // stage_workers)
            if (pipeline := self._spec.parallel.pipeline) is not None:
                numbers = [pipeline] if pipeline <= limit else []
            else:
                numbers = [limit] if goal is None else steps(limit)
            for number in numbers:
                if number * stage_workers >= min_workers and number >= len(pools):
                    for stages in sorted(set(_stage_splits(rooms, number))):
                        yield PoolSplit(pools, stages, stage_workers)

    def _sizes(self, clusters: Sequence[Cluster], min_workers: int, max_workers: int) -> list[int]:
        """Possible workers per stage: divisors of every pool's node size, or whole nodes of each."""
        nodes = [cluster.devices_per_node for cluster in clusters]
        limit, whole = min(cluster.num_devices for cluster in clusters), lcm(*nodes)
        sizes = set(divisors(gcd(*nodes), limit))
        sizes |= {whole << power for power in range((limit // whole).bit_length())}
        if min_workers == max_workers:  # stages of any number of whole nodes that divides the workers
            sizes |= {size for size in divisors(max_workers, limit) if size % whole == 0}
            sizes = {size for size in sizes if max_workers % size == 0}
        return sorted(sizes)

    def plan(self, found: SplitResult, top: int) -> Plan:
        """Plan of a result, with reasons and runners-up on the same split."""
        on = self.on(found.split)
        ranking = on.ranker.rank(on.shapes, top)
        choice, ends = on.ranker.under_both(ranking, on.shapes, on.times_at_ends())
        plan = self._plan_of(on, choice.candidate)
        ends_s = sorted(end.step_s(choice.candidate) for end in ends)
        rest = [entry.candidate for entry in ranking.fitting if entry.candidate != choice.candidate]
        return plan.model_copy(
            update={
                "ends_s": tuple(float(f"{seconds:.6g}") for seconds in ends_s) or None,
                "reasons": (
                    f"{number_of(plan.num_workers, 'worker')}: {number_of(len(plan.stages), 'stage')} of "
                    f"{found.split.stage_workers}",
                    *self._of_stages(plan),
                    *reasons_for(self._spec, on.cluster, plan, ranking.num_shapes),
                    *choice.reasons,
                    *priced_by(self._searches[found.split.pools[0]].software, ends_s),
                    *(
                        line
                        for pool in found.split.pools
                        for line in of_fused(
                            self._searches[pool].software, self._pools[pool].cluster, plan.degrees
                        )
                    ),
                ),
                "runners_up": tuple(
                    runner_up(self._plan_of(on, candidate), plan) for candidate in rest[: max(0, top - 1)]
                ),
            }
        )

    def _on(self, split: PoolSplit) -> OnSplit:
        return OnSplit(self._spec, self._pools, self._searches, self._between, split)

    def _plan_of(self, on: OnSplit, candidate: Candidate) -> Plan:
        deal, split = on.time.deal_units(candidate), on.split
        clusters = [self._pools[pool].cluster for pool in split.pools]
        memory = [on.memory.of_stage(stage, candidate) for stage in deal.stages]
        places = [
            StagePlace(
                pool=self._pools[pool].name, device_type=self._pools[pool].cluster.device,
                units=sum(count for _, count in stage.units), micro_batch_s=float(f"{micro_batch_s:.6g}"),
                memory_bytes=of.total, limit_bytes=of.limit,
            )
            for pool, stage, micro_batch_s, of in zip(
                split.of_stages, deal.stages, deal.micro_batch_s, memory, strict=True
            )
        ]  # fmt: skip
        estimate, first = on.time.estimate(candidate), self._searches[split.pools[0]]
        num_billed = self._billed_devices(split)
        alone = first.plan_of(candidate)
        return alone.model_copy(
            update={
                "predicted": estimate,
                "num_billed_devices": None if num_billed == split.num_workers else num_billed,
                "peak_flops_per_s": self._peak_flops_per_s(split),
                "memory": max(memory, key=lambda stage_memory: stage_memory.total / stage_memory.limit),
                "device_type": " and ".join(dict.fromkeys(cluster.device for cluster in clusters)),
                "stages": tuple(places),
                "blocks": blocks_of(self._spec, candidate, first.profile, deal.stages),
                "not_yet": (*alone.not_yet, "stages on several pools"),
                "made_for": made_across(self._spec, clusters, self._between),
                "money": money_of(
                    self.price(split), billed_devices=num_billed, step_s=estimate.step_s,
                    tokens_per_step=alone.tokens_per_step, num_steps=alone.num_steps,
                ),
            }
        )  # fmt: skip

    def price(self, split: PoolSplit) -> float | None:
        """Mean price per hour of a billed device; None if a pool has no price."""
        total = 0.0
        for pool, num_billed in self._billed_devices_per_pool(split):
            if (price := self._pools[pool].cluster.price_per_hour) is None:
                return None
            total += num_billed * price
        return total / self._billed_devices(split)

    def _billed_devices_per_pool(self, split: PoolSplit) -> list[tuple[int, int]]:
        return [
            (pool, self._pools[pool].cluster.billed_devices(number * split.stage_workers))
            for pool, number in zip(split.pools, split.stages, strict=True)
        ]

    def _billed_devices(self, split: PoolSplit) -> int:
        return sum(num_billed for _, num_billed in self._billed_devices_per_pool(split))

    def _peak_flops_per_s(self, split: PoolSplit) -> float | None:
        """Mean dense peak over all stages; None if one is unknown."""
        dtype = self._spec.train.dtype
        peaks = [self._pools[pool].cluster.traits.peak_flops_per_s.get(dtype) for pool in split.of_stages]
        known_peaks = [peak for peak in peaks if peak is not None]
        return sum(known_peaks) / len(known_peaks) if len(known_peaks) == len(peaks) else None

    def _of_stages(self, plan: Plan) -> Iterator[str]:
        stages_of_pool: dict[str, list[tuple[int, StagePlace]]] = {}
        for number, stage in enumerate(plan.stages, start=1):
            stages_of_pool.setdefault(stage.pool, []).append((number, stage))
        for name, stages in stages_of_pool.items():
            (first, _), (last, _) = stages[0], stages[-1]
            stage_range = f"stage {first}" if first == last else f"stages {first} to {last}"
            num_units = " or ".join(map(str, sorted({stage.units for _, stage in stages})))
            slowest_s = max(stage.micro_batch_s for _, stage in stages)
            yield (
                f"{stage_range} on pool {name}, {number_of(plan.degrees.stage_workers, 'worker')} each: {num_units} of "
                f"{number_of(self._num_units, 'unit')} (layers, embeddings, head), {seconds_of(slowest_s)} of a "
                "micro-batch on the slowest"
            )


def narrowest(clusters: Sequence[Cluster]) -> Cluster:
    """The first cluster, with a node size that divides all clusters'."""
    return clusters[0].model_copy(
        update={"devices_per_node": gcd(*(cluster.devices_per_node for cluster in clusters))}
    )


def _stage_splits(rooms: Sequence[int], number: int) -> Iterator[tuple[int, ...]]:
    """Split `number` stages over pools: fill one after another, in any order, each with at least one."""
    for order in permutations(range(len(rooms))):
        left, counts = number, dict.fromkeys(order, 0)
        for place, pool in enumerate(order):
            counts[pool] = min(rooms[pool], left - (len(order) - 1 - place))
            left -= counts[pool]
        if not left and all(count > 0 for count in counts.values()):
            yield tuple(counts[pool] for pool in range(len(rooms)))
