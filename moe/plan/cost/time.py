"""Predicted time of a step."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from moe.plan.candidate import CHUNKS, Candidate, Sharding
from moe.plan.cluster.cluster import Cluster
from moe.plan.cost.collectives import Network, Ranks
from moe.plan.cost.layer_bytes import BYTES_PER_ELEMENT
from moe.plan.cost.micro_batch import MicroBatch
from moe.plan.cost.orthogonalization import orthogonalization_s
from moe.plan.cost.stages import PipelineChoices, Stage, stages
from moe.plan.cost.state import StateCounter, StateElements
from moe.plan.cost.state_memory import moment_bytes, on_host
from moe.plan.cost.unit_seconds import KINDS
from moe.plan.cost.unit_time import UnitTime
from moe.plan.cost.units import BACKWARD, Unit, units
from moe.plan.degrees import Degrees
from moe.plan.plan import TimeEstimate
from moe.plan.profile import Profile
from moe.plan.schedule import StageSeconds, bubble_s, splits_backward
from moe.plan.software import Software
from moe.spec import JobSpec, MuonSpec

BATCH_S, DRAWN_TOKENS_PER_S, LAID_TOKENS_PER_S = 1e-4, 1.8e9, 1.1e8
"""Batch preparation on a host core: minimum, drawing the global batch, laying out a rank's share. Measured of
`moe.train.batches` on an AMD EPYC (Zen 5), batches of 1,024 to 1,048,576 tokens."""


class StageEnd(NamedTuple):
    """Seconds of a stage's step after its last micro-batch."""

    all_reduce_s: float
    optimizer_s: float
    hidden_s: float
    """Collectives behind the last backward passes."""


class TimeModel:
    """Step time of one job's candidates on one cluster, run by `software` as `profile` says. `load_skew`: rows of
    the busiest expert over the mean."""

    def __init__(
        self, spec: JobSpec, cluster: Cluster, profile: Profile, software: Software, load_skew: float = 1.0
    ) -> None:
        self._spec, self._device, self._network = spec, cluster.calibrated_device, Network(cluster)
        self._software = software
        self._units = units(spec.model, profile, spec.train.freeze)
        self._m = spec.model.model_dim
        self._unit_counts = stages(self._units, PipelineChoices())[0].units
        self._kinds = {
            variant: kind for kind, (unit, _) in enumerate(self._unit_counts) for variant in (unit, unit.untied)
        }
        self._width = BYTES_PER_ELEMENT[spec.train.dtype]
        self._state_width = max(4, self._width)
        self._profile = profile
        self._moment_width, self._is_on_host = moment_bytes(spec), on_host(spec, self._device.kind)
        self._counter = StateCounter(spec.train.optimizer)
        of_units = UnitTime(spec, cluster, profile, software, self._network, load_skew)
        self._unit, self._unit_gathers_s = of_units.unit_seconds, of_units.gathers_s
        self._end_of_step = cache(self._reduce_and_update)
        self._min_unit_seconds = cache(self._min_over_dispatches)

    def step_s(self, candidate: Candidate) -> float:
        return self._sum(candidate, *self._slowest(candidate))[0]

    def estimate(self, candidate: Candidate) -> TimeEstimate:
        """Seconds by kind, of the slowest stage."""
        slowest, one_s = self._slowest(candidate)
        kinds, micro_batch = dict.fromkeys(KINDS, 0.0), MicroBatch.from_candidate(candidate)
        for unit, count in slowest.units:
            seconds = self._unit(unit, micro_batch)
            for name in KINDS:
                kinds[name] += count * candidate.options.num_micro_batches * getattr(seconds, name)
        _, extra_seconds = self._sum(candidate, slowest, one_s)
        extra_seconds["hidden_s"] += kinds.pop("hidden_s")
        return TimeEstimate(**{name: _round_seconds(seconds) for name, seconds in (kinds | extra_seconds).items()})

    def bound_s(self, candidate: Candidate, ranks_per_node: int | None) -> float:
        """Lower bound of the slowest stage's time per micro-batch: even stages, no parameter gathers, best dispatch
        and overlap."""
        unit_seconds = self.min_unit_seconds(candidate, ranks_per_node)
        total = sum(count * seconds for (_, count), seconds in zip(self._unit_counts, unit_seconds, strict=True))
        return total / candidate.degrees.pipeline

    def min_unit_seconds(
        self, candidate: Candidate, ranks_per_node: int | None, *, overlaps: bool = True
    ) -> tuple[float, ...]:
        """Lower bound of seconds per micro-batch by unit kind, for any dispatch, without parameter gathers.
        `overlaps`: behind another micro-batch, which hides at least as much as chunks do."""
        return self._min_unit_seconds(MicroBatch.from_candidate(candidate), ranks_per_node, overlaps)

    def min_gather_seconds(self, candidate: Candidate) -> tuple[float, ...]:
        """Lower bound of the seconds that parameter gathers add to a micro-batch, by unit kind."""
        if not candidate.gathers:
            return (0.0,) * len(self._unit_counts)
        degrees = candidate.degrees
        exposed_share = 1 - self._software.overlap if degrees.pipeline == 1 else 1.0
        return tuple(
            exposed_share * self._unit_gathers_s(unit, degrees.split, degrees.fsdp, degrees.expert_fsdp)
            for unit, _ in self._unit_counts
        )

    def on_even_stages_s(self, unit_seconds: Sequence[float], pipeline: int) -> float:
        """Lower bound of the slowest stage's seconds from those by unit kind: the mean over stages, and each kind's
        even share, rounded up."""
        total = largest = 0.0
        for (_, count), seconds in zip(self._unit_counts, unit_seconds, strict=True):
            total += count * seconds
            largest = max(largest, -(-count // pipeline) * seconds)
        return max(total / pipeline, largest)

    def on_stages_s(self, unit_seconds: Sequence[float], pipeline: PipelineChoices) -> float:
        """Seconds of the slowest stage from those by unit kind."""
        return max(
            sum(count * unit_seconds[self._kinds[unit]] for unit, count in stage.units)
            for stage in stages(self._units, pipeline)
        )

    def layer_seconds(self, candidate: Candidate) -> list[float]:
        """Seconds of each layer for one micro-batch, the embeddings' with the first layer and the head's with the
        last."""
        micro_batch = MicroBatch.from_candidate(candidate)
        first, *others = [self._unit(unit.untied, micro_batch).total_s for unit in self._units]
        *layers, last = others
        layers[0] += first
        layers[-1] += last
        return layers

    def min_extra_s(self, candidate: Candidate) -> float:
        """Lower bound of a step's seconds outside micro-batches and bubble: sends, and the shortest end of any
        stage's step, all overlapped as far as possible."""
        degrees, sharding = candidate.degrees, candidate.options.sharding
        scatters = candidate.options.num_micro_batches if sharding == "gradients" else 1
        behind = scatters if degrees.pipeline == 1 else 1
        share = self._software.overlap
        least_s = math.inf
        for stage in stages(self._units, PipelineChoices.from_candidate(candidate)):
            scatter, once, _, optimizer = self._end_of_step(stage.units, degrees, sharding)
            least_s = min(least_s, scatters * scatter + once - share * (behind * scatter + once) + optimizer)
        return least_s + self._sends_s(candidate, math.inf)

    def _min_over_dispatches(self, plain: MicroBatch, ranks_per_node: int | None, overlaps: bool) -> tuple[float, ...]:
        nodes, chunks = (None, ranks_per_node) if ranks_per_node else (None,), (1,) if overlaps else CHUNKS
        ways = [
            plain._replace(num_chunks=num_chunks, ranks_per_node=per_node, overlap=overlaps)
            for num_chunks, per_node in product(chunks, nodes)
        ]
        return tuple(
            min(self._unit(unit, way).total_s for way in (ways if unit.moe else ways[:1]))
            for unit, _ in self._unit_counts
        )

    def _slowest(self, candidate: Candidate) -> tuple[Stage, float]:
        seconds_by_unit: dict[Unit, float] = {}
        slowest, slowest_s, micro_batch = None, -1.0, MicroBatch.from_candidate(candidate)
        for stage in stages(self._units, PipelineChoices.from_candidate(candidate)):
            stage_s = 0.0
            for unit, count in stage.units:
                if (seconds := seconds_by_unit.get(unit)) is None:
                    seconds = seconds_by_unit[unit] = self._unit(unit, micro_batch).total_s
                stage_s += count * seconds
            if stage_s > slowest_s:
                slowest, slowest_s = stage, stage_s
        assert slowest is not None
        return slowest, slowest_s

    def _end_of(self, candidate: Candidate, stage: Stage, micro_batch_s: float) -> StageEnd:
        """End of a stage's step; it takes `micro_batch_s` per micro-batch."""
        degrees, times = candidate.degrees, candidate.options.num_micro_batches
        scatter, once, last, optimizer = self._end_of_step(stage.units, degrees, candidate.options.sharding)
        scatters = (
            times if candidate.options.sharding == "gradients" else 1
        )  # sharded gradients are reduce-scattered for each micro-batch
        behind = scatters if degrees.pipeline == 1 else 1  # overlapping passes: in a pipeline, the last
        # Collectives once a step overlap with the last backward pass only.
        backward, share = micro_batch_s * BACKWARD / (1 + BACKWARD), self._software.overlap
        of_the_last = min(share * (scatter + once - last), backward)
        hidden_s = (behind - 1) * min(share * scatter, backward) + of_the_last
        return StageEnd(scatters * scatter + once - hidden_s, optimizer, hidden_s)

    def _sum(self, candidate: Candidate, slowest: Stage, micro_batch_s: float) -> tuple[float, dict[str, float]]:
        """Return (seconds of a step, terms other than those of the slowest stage's units)."""
        degrees, times = candidate.degrees, candidate.options.num_micro_batches
        end = self._end_of(candidate, slowest, micro_batch_s)
        terms = {
            "bubble_s": self._bubble_s(candidate, slowest, micro_batch_s),
            "send_s": self._sends_s(candidate, micro_batch_s * times),
            "all_reduce_s": end.all_reduce_s,
            "optimizer_s": end.optimizer_s,
        }
        terms["data_s"] = max(0.0, self._batch_s(degrees) - micro_batch_s * times - sum(terms.values()))
        return micro_batch_s * times + sum(terms.values()), {**terms, "hidden_s": end.hidden_s}

    def _bubble_s(self, candidate: Candidate, slowest: Stage, micro_batch_s: float) -> float:
        """Seconds that a rank waits, as if all were as slow as the slowest."""
        pipeline, virtual_stages = candidate.degrees.pipeline, candidate.options.virtual_stages
        if pipeline == 1:
            return 0.0
        if not splits_backward(candidate.schedule):
            return micro_batch_s * (pipeline - 1) / virtual_stages
        forward_s, weights_s = self._parts_s(slowest, MicroBatch.from_candidate(candidate))
        inputs_s = micro_batch_s - forward_s - weights_s
        seconds = StageSeconds(*(part / virtual_stages for part in (forward_s, inputs_s, weights_s)))
        return bubble_s(candidate.schedule, pipeline, seconds)

    def _parts_s(self, stage: Stage, micro_batch: MicroBatch) -> tuple[float, float]:
        """Seconds of a stage's forward passes and of its weight gradients."""
        forward_s = weights_s = 0.0
        for unit, count in stage.units:
            total_s = self._unit(unit, micro_batch).total_s
            forward_s += count * self._unit(unit.without_backward, micro_batch).total_s
            weights_s += count * max(0.0, total_s - self._unit(unit.frozen, micro_batch).total_s)
        return forward_s, weights_s

    def _batch_s(self, degrees: Degrees) -> float:
        tokens = self._spec.num_groups * self._spec.group_tokens
        return BATCH_S + tokens / DRAWN_TOKENS_PER_S + tokens / degrees.data_ranks / LAID_TOKENS_PER_S

    def _sends_s(self, candidate: Candidate, busy_s: float) -> float:
        """Exposed seconds of sends between stages, both ways. `busy_s`: computation that they overlap with."""
        options, degrees = candidate.options, candidate.degrees
        if degrees.pipeline == 1:
            return 0.0
        tokens = options.micro_batch_groups * self._spec.group_tokens / degrees.tensor / degrees.context
        hop_s = self._network.send(self._width * tokens * self._m, degrees.stage_workers)
        runs = options.num_micro_batches * options.virtual_stages
        send_s = 2 * hop_s * runs
        exposed_s = send_s - min(self._software.overlap * send_s, busy_s) + 2 * hop_s * (degrees.pipeline - 1)
        return exposed_s + runs * self._software.host.run_s

    def _reduce_and_update(
        self, unit_counts: tuple[tuple[Unit, int], ...], degrees: Degrees, sharding: Sharding
    ) -> tuple[float, float, float, float]:
        """Seconds of (one gradient reduce-scatter, collectives once a step, the part of these that cannot begin before
        the backward pass ends, optimizer update)."""
        state = self._counter.of_units(unit_counts, degrees.shards)
        dense, experts = self._replicas(degrees)
        used_elements, stored_elements = state.trained_used, state.trained_stored
        matrices = state.matrices_used
        scatter, once = self._reduction(
            used_elements.dense, stored_elements.dense, matrices.dense, dense, degrees.fsdp, sharding
        )
        of_experts = self._reduction(
            used_elements.in_experts, stored_elements.in_experts, matrices.in_experts, experts, degrees.expert_fsdp,
            sharding,
        )  # fmt: skip
        # Reads weight and gradient, reads and writes the optimizer state, writes the weight.
        moved_bytes = float(3 * self._state_width * stored_elements.total + 2 * self._moment_width * state.optimizer)
        if self._spec.train.ema_decay is not None:  # reads weight and average, writes the average
            moved_bytes += 3 * self._state_width * stored_elements.total
        if self._software.weight_passes is not None and not self._is_on_host:
            moved_bytes += self._weight_pass_bytes(state)
        if sharding != "parameters" and self._profile.bucket_bytes is not None:
            moved_bytes += self._row_copy_bytes(state, degrees)
        update = moved_bytes / self._device.memory_bytes_per_s
        if self._is_on_host:  # gradients and weights to the host, updated weights back
            update = moved_bytes / self._device.host_bytes_per_s
            update += 3 * self._state_width * stored_elements.total / self._device.host_link_bytes_per_s
        optimizer = self._spec.train.optimizer
        if isinstance(optimizer, MuonSpec):
            products = self._device.kernels.products["float64" if self._width == 8 else "bfloat16"]
            update += orthogonalization_s(optimizer, unit_counts, degrees, products, self._network)
        update /= self._software.host.sustained
        once += of_experts[1]
        return scatter + of_experts[0], once, min(once, self._exposed_s(unit_counts, degrees, sharding)), update

    def _replicas(self, degrees: Degrees) -> tuple[Ranks, Ranks]:
        """Ranks with the same parameters, outside experts and in experts."""
        return (
            Ranks(degrees.stage_workers // degrees.tensor, degrees.tensor),
            Ranks(degrees.data, degrees.expert * degrees.expert_tensor),
        )

    def _exposed_s(self, unit_counts: tuple[tuple[Unit, int], ...], degrees: Degrees, sharding: Sharding) -> float:
        """Seconds of the collectives once a step that cannot begin before the backward pass ends: gathers of updated
        weights, and all-reduces of the last gradients, those of an embedding and of one layer's experts (or a bucket,
        if that is larger). 0 for other software, whose overlap comes from published runs."""
        if self._profile.bucket_bytes is None:
            return 0.0
        states = [(unit.is_layer, self._counter.of_unit(unit, degrees.shards)) for unit, _ in unit_counts]
        total = self._counter.of_units(unit_counts, degrees.shards)
        dense, experts = self._replicas(degrees)
        exposed_s = 0.0
        for ranks, fsdp, index in ((dense, degrees.fsdp, 0), (experts, degrees.expert_fsdp, 1)):
            used, stored = total.trained_used[index], total.trained_stored[index]
            if sharding == "parameters" or fsdp == 1:
                last = [state for is_layer, state in states if is_layer == (index == 1)]
                used = max((state.trained_used[index] for state in last), default=0)
                stored = max((state.trained_stored[index] for state in last), default=0)
                if fsdp == 1:
                    used = min(total.trained_used[index], max(used, self._profile.bucket_bytes // self._state_width))
            exposed_s += self._reduction(used, stored, total.matrices_used[index], ranks, fsdp, sharding)[1]
        return exposed_s

    def _row_copy_bytes(self, state: StateElements, degrees: Degrees) -> int:
        """Bytes moved once a step to copy updated shards to the rows of an all-gather, and whole weights from them. On
        CPUs, rows are copied for an all-to-all, and rows of gradients summed after one (`row_collectives`)."""
        num_moved = 0
        for fsdp, used, stored in zip(
            (degrees.fsdp, degrees.expert_fsdp), state.trained_used, state.trained_stored, strict=True
        ):
            num_moved += (used + stored) * (fsdp > 1)
        return (4 if self._device.kind == "cpu" else 2) * self._state_width * num_moved

    def _weight_pass_bytes(self, state: StateElements) -> float:
        """Bytes moved once a step to cast updated weights, and to clip gradients: norm, then scaling."""
        is_fused, element_bytes = self._software.weight_passes == "fused", 0
        if self._spec.train.clip_norm is not None:
            element_bytes += (1 if is_fused else 3) * self._state_width
        if self._width < self._state_width:
            element_bytes += self._width + (0 if is_fused else self._state_width)
        return element_bytes * state.trained_stored.total

    def _reduction(
        self, num_used: int, num_stored: int, num_in_matrices: int, ranks: Ranks, fsdp: int, sharding: Sharding
    ) -> tuple[float, float]:
        """Seconds of (a gradient reduce-scatter over `ranks`, collectives once a step: an all-gather of updated
        weights, or an all-reduce). `num_in_matrices`: those of `num_used` whose masters may be sharded. `fsdp`: ranks
        that shard parameters, or only their state, which takes at most as long over some of `ranks` as over all."""
        width = self._state_width
        if not num_used or ranks.count == 1:
            return 0.0, 0.0
        if fsdp > 1 and sharding == "parameters":  # after the reduce-scatter: an all-reduce over the replicas
            left = Ranks(max(1, ranks.count // fsdp), ranks.stride * fsdp)
            return 0.0, self._network.all_reduce(width * num_stored, left)
        if fsdp > 1:
            num_narrow = num_in_matrices if self._profile.gathers_in_float32 else num_used
            num_bytes = width * (num_used - num_narrow) + min(width, self._width) * num_narrow
            return self._network.gather(width * num_used, ranks), self._network.gather(num_bytes, ranks)
        return 0.0, self._network.all_reduce(width * num_used, ranks)


def _round_seconds(seconds: float) -> float:
    """Round to six digits: plans must not depend on the last bits of a machine's sums."""
    return float(f"{seconds:.6g}")
