"""Search space of layouts."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import lcm

from moe.plan.candidate import CHUNKS, RECOMPUTES, SHARDINGS, Candidate, Options, Recompute, Sharding
from moe.plan.cluster.cluster import Cluster
from moe.plan.degrees import Degrees
from moe.plan.fit import divided_dims, fit_problems, too_many_stages
from moe.plan.profile import OURS, Profile
from moe.plan.schedule import can_pair_passes, micro_batches_problem, min_micro_batches, splits_backward
from moe.spec import JobSpec, Problem, SpecError
from moe.spec.parallel import PipelineSchedule
from moe.spec.stages import format_stages

_SHORTEST_CONTEXT = 4096
"""Fewest tokens per context rank; attention over fewer is a small part of a layer."""


class LayoutChoices:
    """Search space of one job on one cluster; fields set in `parallel` are fixed."""

    def __init__(self, spec: JobSpec, cluster: Cluster, profile: Profile = OURS) -> None:
        self._spec, self._parallel, self._cluster = spec, spec.parallel, cluster
        self._per_node = cluster.devices_per_node
        self._profile = profile
        # Such a job may also run on so few workers that there is nothing to shard.
        self._is_elastic = spec.resources.num_workers is None
        num_layers = sum(1 for path, _ in spec.model.blocks() if path)
        self._max_stages = num_layers + 2 * profile.allows_layerless_stages

    def check(self) -> None:
        """Raise SpecError if the job asks for more stages than there are layers."""
        pipeline, per_rank = self._parallel.pipeline or 1, self._min_virtual
        if pipeline > 1 and pipeline * per_rank > self._max_stages:
            raise SpecError(too_many_stages(pipeline, per_rank, self._max_stages))

    def shapes(self, workers: int) -> Iterator[Degrees]:
        """Yield all degrees that model, workers and nodes allow, with FSDP degrees 1.

        Tensor and expert-tensor groups stay within nodes, unless the job asks for more.
        """
        parallel, moe = self._parallel, self._spec.model.moe
        by_axis: dict[str, list[int]] = {}
        for _, number, axis, _ in divided_dims(self._spec.model):
            by_axis.setdefault(axis, []).append(number)
        if self._spec.model.kind == "language":  # two equal chunks of a row on each rank
            half_row, odd = divmod(self._spec.data.max_tokens, 2)
            by_axis["context"] = [1 if odd else half_row]

        def possible(axis: str, total: int, limit: int) -> list[int]:
            user_degree: int | None = getattr(parallel, axis)
            choices = (
                divisors(total, limit) if user_degree is None else [user_degree] if total % user_degree == 0 else []
            )
            return [degree for degree in choices if all(number % degree == 0 for number in by_axis.get(axis, ()))]

        for pipeline in possible("pipeline", workers, self._max_pipeline):
            ranks = workers // pipeline
            for expert_tensor in possible("expert_tensor", ranks, self._per_node if moe else 1):
                for expert in possible("expert", ranks // expert_tensor, moe.num_experts if moe else 1):
                    data = ranks // expert_tensor // expert
                    if parallel.data not in (None, data):
                        continue
                    for tensor in possible("tensor", ranks, self._per_node):
                        for context in possible("context", ranks // tensor, self._max_context()):
                            shape = Degrees(expert, data, tensor, 1, expert_tensor, 1, context, pipeline)
                            if self._is_possible(shape):
                                yield shape

    @property
    def _max_pipeline(self) -> int:
        """Most pipeline ranks, each with a layer in every virtual stage; 1 is always possible."""
        return max(1, self._max_stages // self._min_virtual)

    @property
    def multiple(self) -> int:
        """Divisor of the number of workers that the requested degrees imply."""
        degrees = {axis: getattr(self._parallel, axis) or 1 for axis in vars(Degrees())}
        experts = degrees["expert"] * degrees["expert_tensor"]
        dense = lcm(degrees["tensor"] * degrees["context"], degrees["tensor"] * degrees["fsdp"])
        return degrees["pipeline"] * lcm(experts * degrees["data"], experts * degrees["expert_fsdp"], dense)

    def _is_possible(self, shape: Degrees) -> bool:
        """Whether the shape allows the requested stages, exchange and overlap."""
        parallel = self._parallel
        if shape.pipeline == 1 and ((parallel.num_virtual_stages or 1) > 1 or parallel.schedule or parallel.stages):
            return False
        if parallel.stages is not None and not self._can_have(len(parallel.stages), shape.pipeline):
            return False
        exchange = parallel.context_exchange
        if exchange is not None and (shape.context == 1 or fit_problems(self._spec.model, shape.axes, exchange)):
            return False
        if (self._requested_schedule or parallel.overlap) and not self.micro_batches(shape):
            return False
        if parallel.overlap and parallel.virtual_stages == 1 and shape.pipeline > 1:
            return False
        travels = shape.expert * shape.expert_tensor > 1
        return not parallel.overlap or travels

    def _can_have(self, num_stages: int, pipeline: int) -> bool:
        """Whether so many stages are the same number on each rank, and one that the job allows."""
        per_rank, rest = divmod(num_stages, pipeline)
        return rest == 0 and per_rank >= self._min_virtual and self._parallel.num_virtual_stages in (None, per_rank)

    def _max_context(self) -> int:
        is_unsplit = self._spec.model.sides > 1  # encoder-decoder: rows have two lengths and are not split
        return 1 if is_unsplit else max(1, self._spec.data.max_tokens // _SHORTEST_CONTEXT)

    def with_fsdp(self, shape: Degrees) -> Iterator[Degrees]:
        """Yield the shape with dense and expert parameters sharded over one rank, a node's ranks or all."""
        parallel, moe = self._parallel, self._spec.model.moe
        dense = self._fsdp_degrees(shape.replica_ranks, shape.tensor, parallel.fsdp)
        experts = [1]
        if moe is not None or parallel.expert_fsdp is not None:
            experts = self._fsdp_degrees(shape.data, shape.expert * shape.expert_tensor, parallel.expert_fsdp)
        for fsdp, expert_fsdp in product(dense, experts):
            yield replace(shape, fsdp=fsdp, expert_fsdp=expert_fsdp)

    def _fsdp_degrees(self, ranks: int, stride: int, user_degree: int | None) -> list[int]:
        """FSDP degrees over `ranks` ranks that are `stride` apart; only `user_degree`, if it is set."""
        in_node = self._per_node // stride
        candidates = {1, in_node, ranks} if user_degree is None else {user_degree}
        return sorted(degree for degree in candidates if degree > 0 and ranks % degree == 0)

    def shardings(self, degrees: Degrees) -> tuple[Sharding, ...]:
        """Shardings to try. Optimizer and gradients are sharded over all replicas only: over a node's is no faster,
        and takes as much memory or more, except 0.1% under Adafactor."""
        if self._parallel.sharding is not None:
            is_unsharded = degrees.fsdp == degrees.expert_fsdp == 1
            may_be_unsharded = self._is_elastic and degrees.replica_ranks == 1
            return () if is_unsharded and not may_be_unsharded else (self._parallel.sharding,)
        is_partial = (
            self._parallel.fsdp is None and degrees.fsdp not in (1, degrees.replica_ranks),
            self._parallel.expert_fsdp is None and degrees.expert_fsdp not in (1, degrees.data),
        )
        if degrees.fsdp == degrees.expert_fsdp == 1 or any(is_partial):
            return ("parameters",)
        return SHARDINGS

    def virtual_stages(self, pipeline: int, num_micro_batches: int) -> list[int]:
        """Numbers of virtual stages to try; more than one only with enough micro-batches to interleave."""
        numbers = self._any_virtual_stages(pipeline)
        enough = num_micro_batches >= min_micro_batches("interleaved", pipeline)
        return [number for number in numbers if number == 1 or enough]

    def _any_virtual_stages(self, pipeline: int) -> list[int]:
        if pipeline == 1:
            return [1]
        if (stages := self._parallel.stages) is not None:
            return [len(stages) // pipeline]
        if (number := self._parallel.num_virtual_stages) is not None:
            return [number]
        return [number for number in steps(self._max_stages // pipeline) if number >= self._min_virtual]

    @property
    def _min_virtual(self) -> int:
        return self._parallel.min_virtual

    def recomputes(self) -> tuple[Recompute, ...]:
        if self._parallel.recompute is not None:
            return (self._parallel.recompute,)
        return RECOMPUTES[:-1] if self._parallel.overlap else RECOMPUTES

    def micro_batches(self, degrees: Degrees) -> list[tuple[int, int]]:
        """(token groups per micro-batch, number of micro-batches) pairs, the largest first; the smallest size of
        each number."""
        groups = -(-self._spec.num_groups // degrees.data_ranks)
        user_groups = self._parallel.micro_batch_groups
        sizes = (
            [min(user_groups, groups)]
            if user_groups
            else sorted({-(-groups // times) for times in steps(groups)})[::-1]
        )
        counts = [(size, -(-groups // size)) for size in sizes]
        least = max(2 * bool(self._parallel.overlap), self._min_micro_batches(degrees.pipeline))
        return [(size, times) for size, times in counts if times >= least]

    def _min_micro_batches(self, pipeline: int) -> int:
        """Fewest that the requested schedule, or virtual stages, allow."""
        if pipeline == 1 or (schedule := self._requested_schedule) is None:
            return 1
        return min_micro_batches(schedule, pipeline)

    @property
    def _requested_schedule(self) -> PipelineSchedule | None:
        """Schedule that the job asks for, possibly by its virtual stages."""
        return self._parallel.schedule or ("interleaved" if self._min_virtual > 1 else None)

    @property
    def min_bubble(self) -> float:
        """Least bubble, in that of a schedule that does not split backward passes; input or weight gradients take
        about as long as forward passes, or less."""
        schedule = self._parallel.schedule
        return 0.25 if schedule is not None and splits_backward(schedule) else 1.0

    def option_problems(self, workers: int) -> list[Problem]:
        """Problems of requested overlap, and of requested options of a pipeline or of context ranks, that no shape
        allows, if degrees do."""
        names = ("stages", "schedule", "virtual_stages", "context_exchange", "overlap")
        free = self._parallel.model_copy(update=dict.fromkeys(names))
        choices = LayoutChoices(self._spec.model_copy(update={"parallel": free}), self._cluster, self._profile)
        shapes = [shape for shape in choices.shapes(workers) if any(True for _ in choices.with_fsdp(shape))]
        if not shapes:
            return []
        if self._parallel.stages is not None:
            num_stages = len(self._parallel.stages)
            shapes = [shape for shape in shapes if shape.pipeline == 1 or self._can_have(num_stages, shape.pipeline)]
        for axis, options in (("pipeline", names[:3]), ("context", names[3:4])):
            requested = [name for name in options if getattr(self._parallel, name) not in (None, 1)]
            if requested and all(getattr(shape, axis) == 1 for shape in shapes):
                value = getattr(self._parallel, requested[0])
                value = format_stages(value) if requested[0] == "stages" else value
                return [Problem("requires", f"parallel.{requested[0]}", value,
                                f"requires a {axis} degree above 1, but the workers (={workers}) and the other degrees "
                                "leave room for none",
                                "omit it, or use more workers")]  # fmt: skip
        counts = {shape: choices.micro_batches(shape)[-1][1] for shape in shapes}
        if self._parallel.overlap and (problem := _overlap_problem(counts, workers)) is not None:
            return [problem]
        if (schedule := self._requested_schedule) is None:
            return []
        pipelines = sorted({shape.pipeline for shape in shapes if shape.pipeline > 1})
        if pipelines and pipelines[0] * self._min_virtual > self._max_stages:
            return [too_many_stages(pipelines[0], self._min_virtual, self._max_stages)]
        by_pipeline = {shape.pipeline: number for shape, number in counts.items() if shape.pipeline > 1}
        for pipeline, num_micro_batches in sorted(by_pipeline.items()):
            if (problem := micro_batches_problem(schedule, pipeline, num_micro_batches)) is not None:
                return [problem]
        return []

    def plain(self, shape: Degrees) -> Candidate:
        """Candidate with the smallest micro-batch and the simplest allowed dispatch."""
        size, times = self.micro_batches(shape)[-1]
        in_nodes = self._parallel.dispatch == "hierarchical"
        options = Options(
            num_chunks=self._parallel.num_chunks or 1, overlap=bool(self._parallel.overlap),
            ranks_per_node=self.ranks_per_node(shape) if in_nodes else None,
            schedule=self._parallel.schedule, stages=self._parallel.stages,
            context_exchange=self._parallel.context_exchange or "gather",
            micro_batch_groups=size, num_micro_batches=times,
        )  # fmt: skip
        return Candidate(shape, options)

    def data_shardings(self, shape: Degrees) -> Iterator[tuple[Degrees, Sharding]]:
        """Yield all ways to shard state over data ranks."""
        for degrees in self.with_fsdp(shape):
            for sharding in self.shardings(degrees):
                yield degrees, sharding

    def dispatches(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidate with other dispatch options, if rows leave their rank."""
        parallel, degrees = self._parallel, candidate.degrees
        if degrees.expert * degrees.expert_tensor == 1:
            return
        chunks = (parallel.num_chunks,) if parallel.num_chunks else CHUNKS
        ways = [(num_chunks, False) for num_chunks in chunks if not parallel.overlap]
        if parallel.overlap is not False and self.can_overlap(candidate) and 1 in chunks:
            ways.append((1, True))
        kinds = [candidate.options.ranks_per_node]
        if parallel.dispatch is None and (per_node := self.ranks_per_node(degrees)) is not None:
            kinds = [None, per_node]
        for (num_chunks, overlap), ranks_per_node in product(ways, kinds):
            variant = candidate.with_options(num_chunks=num_chunks, ranks_per_node=ranks_per_node, overlap=overlap)
            if variant != candidate:
                yield variant

    def can_overlap(self, candidate: Candidate) -> bool:
        """Whether blocks of two micro-batches can take turns, pausing for their all-to-all, as in Megatron-Core.
        They cannot be recomputed whole; in a pipeline the two come from virtual stages."""
        options = candidate.options
        can_pair = can_pair_passes(options.pipeline_schedule, candidate.degrees.pipeline)
        return options.num_micro_batches > 1 and options.recompute != "full" and can_pair

    def ranks_per_node(self, degrees: Degrees) -> int | None:
        """Ranks per node for hierarchical dispatch; None unless expert groups span whole nodes of whole experts."""
        per_node, group = self._per_node, degrees.expert * degrees.expert_tensor
        fits = group > per_node > 1 and group % per_node == 0 and per_node % degrees.expert_tensor == 0
        return per_node if fits else None

    def fits_nodes(self, degrees: Degrees) -> bool:
        """Whether hierarchical dispatch is possible, if requested."""
        spans = degrees.expert * degrees.expert_tensor > self._per_node > 1
        return self._parallel.dispatch != "hierarchical" or not spans or self.ranks_per_node(degrees) is not None


def _overlap_problem(num_micro_batches: Mapping[Degrees, int], workers: int) -> Problem | None:
    """Problem of requested overlap if no shape has rows that travel, in two micro-batches or more.

    `num_micro_batches`: the most of each shape.
    """
    traveling = [number for shape, number in num_micro_batches.items() if shape.expert * shape.expert_tensor > 1]
    if not traveling:
        return Problem("requires", "parallel.overlap", True,
                       f"requires an expert or expert_tensor degree above 1, but the workers (={workers}) and the "
                       "other degrees leave room for none",
                       "omit it, or use more workers")  # fmt: skip
    if max(traveling) < 2:
        return Problem("requires", "parallel.overlap", True, "requires 2 micro-batches or more, but a step has 1",
                       "use a smaller parallel.micro_batch_groups or larger batches, or omit it")  # fmt: skip
    return None


def divisors(number: int, limit: int) -> list[int]:
    """Divisors of `number` up to `limit`, in order."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({factor for divisor in small for factor in (divisor, number // divisor) if factor <= limit})


def steps(limit: int) -> list[int]:
    """Numbers from 1 to `limit`, inclusive: all to 8, then four per doubling."""
    numbers = [quarters << doublings for doublings in range(max(1, limit.bit_length())) for quarters in (4, 5, 6, 7)]
    return sorted({*range(1, min(limit, 3) + 1), *(number for number in numbers if number <= limit), limit})
