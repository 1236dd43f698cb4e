"""Memory and time of a pipeline whose stages are on pools of different devices."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

from moe.plan.candidate import Candidate
from moe.plan.cluster.pools import Between
from moe.plan.cost.dealing import Dealer, OfUnits
from moe.plan.cost.memory import MemoryModel
from moe.plan.cost.run_choices import RunChoices, StateOptions, placed_of
from moe.plan.cost.stages import Stage
from moe.plan.cost.time import Hops, StageEnd, TimeModel
from moe.plan.degrees import Degrees
from moe.plan.plan import MemoryEstimate, TimeEstimate


class AcrossMemory:
    """Memory of stages on the pools that the dealer assigns. `models`: one per pool."""

    def __init__(self, models: Sequence[MemoryModel], dealer: Dealer) -> None:
        self._models, self._dealer = models, dealer
        self._usable_bytes = sum(models[pool].usable_bytes for pool in dealer.pools)
        self._beside = [cache(model.stage_beside) for model in models]
        self._fits = cache(self._can_be_dealt)

    def fits(self, candidate: Candidate) -> bool:
        """Whether some assignment of units fits all stages."""
        return self._fits(placed_of(candidate), RunChoices.from_candidate(candidate))

    def _can_be_dealt(self, layout: StateOptions, run: RunChoices) -> bool:
        if not self._has_room(layout, run):
            return False
        return self._dealer.can_be_dealt(partial(self._stage_fits, layout, run))

    def _has_room(self, layout: StateOptions, run: RunChoices) -> bool:
        """Necessary condition: all stages together hold all units at the last stage's cost, as no stage has fewer
        micro-batches in flight and parts take no less than the whole."""
        whole, model = self._dealer.whole, self._models[self._dealer.pools[-1]]
        return model.stage_state(whole, layout) + model.stage_beside(whole, run) <= self._usable_bytes

    def stage_fits(self, candidate: Candidate) -> "partial[bool]":
        """Predicate: whether a stage fits its pool's devices."""
        return partial(self._stage_fits, placed_of(candidate), RunChoices.from_candidate(candidate))

    def may_hold(self, shape: Degrees) -> bool:
        """Whether the devices of one rank's place in all stages together hold its state's lower bound."""
        least = self._models[self._dealer.pools[0]].bound_of_state(replace(shape, pipeline=1))
        return least <= self._usable_bytes

    def of_stage(self, stage: Stage, candidate: Candidate) -> MemoryEstimate:
        return self._models[self._dealer.pools[stage.index]].of_stage(stage, candidate)

    def _stage_fits(self, layout: StateOptions, run: RunChoices, stage: Stage) -> bool:
        pool = self._dealer.pools[stage.index]
        model = self._models[pool]
        return self._beside[pool](stage, run) + model.stage_state(stage, layout) <= model.usable_bytes


class Dealt(NamedTuple):
    """Units of a candidate assigned to stages."""

    stages: tuple[Stage, ...]
    micro_batch_s: tuple[float, ...]
    """Seconds per micro-batch of each stage, forward and backward."""

    @property
    def slowest(self) -> int:
        return max(range(len(self.stages)), key=lambda index: self.micro_batch_s[index])


class AcrossTime:
    """`TimeModel` for stages on several pools. `models`: one per pool. Values by unit kind are concatenated pool by
    pool.

    The slowest stage sets the pace: the bubble is one of its micro-batches for each other stage. The longest end of
    any stage's step follows. No virtual stages.
    """

    def __init__(
        self, models: Sequence[TimeModel], dealer: Dealer, between: Between, memory: AcrossMemory
    ) -> None:
        self._models, self._dealer, self._between, self._memory = models, dealer, between, memory
        self._pools_in_use = sorted(dealer.stages_of_pool)
        self._least = cache(self._least_on_stages_s)

    def deal_units(self, candidate: Candidate) -> Dealt:
        """Assign units to make the slowest stage as fast as possible. Raises ValueError if nothing fits."""
        of_units = [
            [model.unit_s(kind, candidate) for kind in self._dealer.kinds]
            if pool in self._pools_in_use
            else ()
            for pool, model in enumerate(self._models)
        ]
        ends = self._dealer.deal(of_units, self._memory.stage_fits(candidate))
        if ends is None:
            raise ValueError(f"no stages fit: {candidate}")
        stages = self._dealer.stages(ends)
        return Dealt(stages, tuple(self._dealer.seconds(stage, of_units) for stage in stages))

    def step_s(self, candidate: Candidate) -> float:
        deal = self.deal_units(candidate)
        of, one_s = deal.slowest, deal.micro_batch_s[deal.slowest]
        return self._model(of).step_on(candidate, one_s, self._hops(candidate), self._end(candidate, deal))

    def estimate(self, candidate: Candidate) -> TimeEstimate:
        deal = self.deal_units(candidate)
        of, one_s = deal.slowest, deal.micro_batch_s[deal.slowest]
        hops, end = self._hops(candidate), self._end(candidate, deal)
        return self._model(of).of_step_on(candidate, deal.stages[of], one_s, hops, end)

    def _end(self, candidate: Candidate, deal: Dealt) -> StageEnd:
        ends = (
            self._model(stage.index).end_of(candidate, stage, one_s)
            for stage, one_s in zip(deal.stages, deal.micro_batch_s, strict=True)
        )
        return max(ends, key=lambda end: end.total_s)

    def bound_s(self, candidate: Candidate, ranks_per_node: int | None) -> float:
        of_units = self.least_of_units(candidate, ranks_per_node)
        return self.on_even_stages_s(of_units, candidate.degrees.pipeline)

    def least_of_units(
        self, candidate: Candidate, ranks_per_node: int | None, *, overlaps: bool = True
    ) -> tuple[float, ...]:
        """Lower bound of seconds per micro-batch by unit kind, pool by pool."""
        return tuple(
            seconds
            for pool in self._pools_in_use
            for seconds in self._models[pool].least_of_units(candidate, ranks_per_node, overlaps=overlaps)
        )

    def least_gathers(self, candidate: Candidate) -> tuple[float, ...]:
        return tuple(
            seconds for pool in self._pools_in_use for seconds in self._models[pool].least_gathers(candidate)
        )

    def on_even_stages_s(self, of_units: Sequence[float], pipeline: int) -> float:
        """Lower bound of the slowest stage's seconds, with divisible units."""
        return self._dealer.least_s(self._by_pool(of_units))

    def on_stages_s(self, of_units: Sequence[float], pipeline: int, virtual_stages: int) -> float:
        """Lower bound of the slowest stage's seconds, ignoring memory."""
        return self._least(tuple(of_units))

    def least_beside_s(self, candidate: Candidate) -> float:
        """Lower bound of a step's seconds beside micro-batches and bubble: sends."""
        return self._models[self._pools_in_use[0]].sends_s(candidate, float("inf"), self._hops(candidate))

    def _least_on_stages_s(self, of_units: tuple[float, ...]) -> float:
        return self._dealer.slowest_s(self._by_pool(of_units))

    def _by_pool(self, of_units: Sequence[float]) -> OfUnits:
        num_kinds, values = len(self._dealer.kinds), iter(of_units)
        of_pool = {pool: [next(values) for _ in range(num_kinds)] for pool in self._pools_in_use}
        return [of_pool.get(pool, []) for pool in range(len(self._models))]

    def _model(self, stage: int) -> TimeModel:
        return self._models[self._dealer.pools[stage]]

    def _hops(self, candidate: Candidate) -> Hops:
        hops_s = list(self._hops_s(candidate))
        return Hops(max(hops_s), sum(hops_s))

    def _hops_s(self, candidate: Candidate) -> Iterator[float]:
        pools, (first, *_) = self._dealer.pools, self._pools_in_use
        across_s = (
            self._between.latency_s + self._models[first].hop_bytes(candidate) / self._between.bytes_per_s
        )
        within_s = {pool: self._models[pool].hop_s(candidate) for pool in self._pools_in_use}
        for sender, receiver in pairwise(pools):
            yield within_s[sender] if sender == receiver else across_s
