"""Schedule and stage cut of a pipeline, and the exchange between context ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from moe.plan.candidate import EXCHANGES, Candidate
from moe.plan.cost.balance import balanced_stages
from moe.plan.cost.memory import MemoryModel
from moe.plan.cost.time import TimeModel
from moe.plan.fit import fit_problems
from moe.plan.schedule import can_pair_passes, min_micro_batches, splits_backward
from moe.plan.search.ranking import Ranking
from moe.plan.search.shape import RankedCandidate
from moe.spec import JobSpec
from moe.spec.parallel import VIRTUAL_STAGES_OF_ZB_V, ContextExchange, PipelineSchedule
from moe.spec.stages import even_stages


@dataclass(frozen=True)
class Refinement:
    """Gives layouts the fastest schedule, stage cut and context exchange that fit in memory.

    The search compares pipelines of stages as even as possible, without split backward passes, and context ranks that
    gather keys and values. This changes no other choice, and none that the job makes.
    """

    spec: JobSpec
    memory: MemoryModel
    time: TimeModel
    limit_bytes: int
    not_yet: Callable[[Candidate], tuple[str, ...]]
    """Features of a candidate that cannot be run yet."""

    def ranking(self, ranking: Ranking) -> Ranking:
        """Return the ranking with every layout refined."""
        fitting = [self._ranked(entry) for entry in ranking.fitting]
        return replace(ranking, fitting=sorted(fitting, key=lambda entry: entry.order))

    def _ranked(self, entry: RankedCandidate) -> RankedCandidate:
        candidate = self.candidate(entry.candidate)
        step_s = self.time.step_s(candidate)
        return replace(entry, candidate=candidate, step_s=step_s, not_yet=self.not_yet(candidate))

    def candidate(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the fastest schedule, stages and exchange; a peer's, and those without stages and
        context ranks, stay as they are."""
        degrees = candidate.degrees
        if degrees.pipeline == degrees.context == 1 or self.memory.profile.name != "ours":
            return candidate
        features = set(self.not_yet(candidate))
        feasible = [
            variant
            for variant in self._variants(candidate)
            if features.issuperset(self.not_yet(variant)) and self.memory.total(variant) <= self.limit_bytes
        ]
        if not feasible:
            return candidate
        return min(feasible, key=lambda variant: (float(f"{self.time.step_s(variant):.6g}"), variant.key))

    def _variants(self, candidate: Candidate) -> Iterator[Candidate]:
        for exchange in self._exchanges(candidate):
            exchanging = candidate.with_options(context_exchange=exchange)
            if candidate.degrees.pipeline == 1:
                yield exchanging
                continue
            for schedule in self._schedules(candidate):
                for stages in self._cuts(exchanging):
                    yield exchanging.with_options(schedule=schedule, stages=stages)

    def _exchanges(self, candidate: Candidate) -> list[ContextExchange]:
        if candidate.degrees.context == 1:
            return ["gather"]
        if (requested := self.spec.parallel.context_exchange) is not None:
            return [requested]
        model, degrees = self.spec.model, candidate.degrees.axes
        return [exchange for exchange in EXCHANGES if not fit_problems(model, degrees, exchange)]

    def _schedules(self, candidate: Candidate) -> list[PipelineSchedule]:
        """Schedules with enough micro-batches. Blocks that are recomputed whole are not split: their recomputed tensors
        would be kept until the weight gradients."""
        options, pipeline = candidate.options, candidate.degrees.pipeline
        if self.spec.parallel.schedule is not None:
            return [self.spec.parallel.schedule]
        by_virtual_stages: dict[int, list[PipelineSchedule]] = {
            1: ["1f1b", "zero_bubble"], VIRTUAL_STAGES_OF_ZB_V: ["interleaved", "zb_v"],
        }  # fmt: skip
        fitting = [
            schedule
            for schedule in by_virtual_stages.get(options.virtual_stages, ["interleaved"])
            if options.num_micro_batches >= min_micro_batches(schedule, pipeline)
            and not (splits_backward(schedule) and options.recompute == "full")
            and not (options.overlap and not can_pair_passes(schedule, pipeline))
        ]
        return fitting or ["gpipe"]

    def _cuts(self, candidate: Candidate) -> list[tuple[int, ...]]:
        if self.spec.parallel.stages is not None:
            return [self.spec.parallel.stages]
        layer_seconds = self.time.layer_seconds(candidate)
        num_stages = candidate.degrees.pipeline * candidate.options.virtual_stages
        even, balanced = even_stages(len(layer_seconds), num_stages), balanced_stages(layer_seconds, num_stages)
        return list(dict.fromkeys([even, balanced]))
