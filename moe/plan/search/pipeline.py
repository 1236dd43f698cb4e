"""Schedule and stage cut of a pipeline."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from moe.plan.candidate import Candidate
from moe.plan.cost.balance import balanced_stages
from moe.plan.cost.memory import MemoryModel
from moe.plan.cost.time import TimeModel
from moe.plan.schedule import least_micro_batches, splits_backward
from moe.plan.search.ranking import Ranking
from moe.plan.search.shape import RankedCandidate
from moe.spec import ParallelSpec
from moe.spec.parallel import VIRTUAL_STAGES_OF_ZB_V, PipelineSchedule
from moe.spec.stages import even_stages


@dataclass(frozen=True)
class PipelineRefinement:
    """Gives pipelines the fastest schedule and stage cut that fit in memory.

    The search compares pipelines of stages as even as possible, without split backward passes. This changes no other
    choice, and none that the job makes.
    """

    parallel: ParallelSpec
    memory: MemoryModel
    time: TimeModel
    limit_bytes: int
    not_yet: Callable[[Candidate], tuple[str, ...]]
    """Features of a candidate that cannot be run yet."""

    def ranking(self, ranking: Ranking) -> Ranking:
        """Return the ranking with every pipeline refined."""
        fitting = [self._ranked(entry) for entry in ranking.fitting]
        return replace(ranking, fitting=sorted(fitting, key=lambda entry: entry.order))

    def _ranked(self, entry: RankedCandidate) -> RankedCandidate:
        candidate = self.candidate(entry.candidate)
        step_s = self.time.step_s(candidate)
        return replace(entry, candidate=candidate, step_s=step_s, not_yet=self.not_yet(candidate))

    def candidate(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the fastest schedule and stages, both written out; a peer's and those without a
        pipeline stay as they are."""
        if candidate.degrees.pipeline == 1 or self.memory.profile.name != "ours":
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
        for schedule in self._schedules(candidate):
            for stages in self._cuts(candidate):
                yield candidate.with_options(schedule=schedule, stages=stages)

    def _schedules(self, candidate: Candidate) -> list[PipelineSchedule]:
        """Schedules with enough micro-batches. Blocks that are recomputed whole are not split: their recomputed tensors
        would be kept until the weight gradients."""
        options, pipeline = candidate.options, candidate.degrees.pipeline
        if self.parallel.schedule is not None:
            return [self.parallel.schedule]
        by_virtual_stages: dict[int, list[PipelineSchedule]] = {
            1: ["1f1b", "zero_bubble"], VIRTUAL_STAGES_OF_ZB_V: ["interleaved", "zb_v"],
        }  # fmt: skip
        fitting = [
            schedule
            for schedule in by_virtual_stages.get(options.virtual_stages, ["interleaved"])
            if options.num_micro_batches >= least_micro_batches(schedule, pipeline)
            and not (splits_backward(schedule) and options.recompute == "full")
        ]
        return fitting or ["gpipe"]

    def _cuts(self, candidate: Candidate) -> list[tuple[int, ...]]:
        if self.parallel.stages is not None:
            return [self.parallel.stages]
        layer_seconds = self.time.layer_seconds(candidate)
        num_stages = candidate.degrees.pipeline * candidate.options.virtual_stages
        even, balanced = even_stages(len(layer_seconds), num_stages), balanced_stages(layer_seconds, num_stages)
        return list(dict.fromkeys([even, balanced]))
