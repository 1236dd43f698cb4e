"""Predicted memory of a layout on its fullest device.

State (parameters, gradients, moments) is counted weight by weight, activations by the tensors saved for the backward
pass.
"""

from functools import cache
from math import inf
from operator import add
from typing import NamedTuple

from moe.plan.candidate import Candidate, Recompute, Sharding
from moe.plan.cluster.cluster import Cluster
from moe.plan.cost.communication_bytes import CommunicationBytes
from moe.plan.cost.layer_bytes import BYTES_PER_ELEMENT, LayerBytes, LayerMemory
from moe.plan.cost.orthogonalization import update_bytes
from moe.plan.cost.run_choices import RunChoices, StateOptions
from moe.plan.cost.stages import PipelineChoices, Stage, in_flight, rank_stages, shares, stages
from moe.plan.cost.state_memory import StateMemory
from moe.plan.cost.units import Unit, units
from moe.plan.degrees import Degrees, ShardCounts, WorkSplit
from moe.plan.plan import MemoryEstimate
from moe.plan.profile import Profile
from moe.spec import JobSpec, MuonSpec

ALLOWANCE = 0.1
"""Share of device memory reserved for the framework and fragmentation."""


class _NonStateBytes(NamedTuple):
    """Bytes of a stage other than its state."""

    activations: int
    dispatch: int
    workspace: int
    logits: int
    pipeline_buffers: int


_NOTHING = LayerBytes(0, 0, 0)


class MemoryModel:
    """Memory of one job's candidates on one cluster. `load_skew`: rows of the busiest expert over the mean."""

    def __init__(self, spec: JobSpec, cluster: Cluster, profile: Profile, load_skew: float = 1.0) -> None:
        self._limit, self._kind = cluster.memory_bytes, cluster.calibrated_device.kind
        self.allowance = int(ALLOWANCE * self._limit)
        self._num_groups, self._group_tokens = spec.num_groups, spec.group_tokens
        self._m, self._units = spec.model.model_dim, units(spec.model, profile, spec.train.freeze)
        # A requested cut need not be even; nor are the ranks of a V.
        self._are_even = spec.parallel.stages is None and spec.parallel.schedule != "zb_v"
        self._layers = LayerMemory(spec, self._kind, profile, load_skew)
        self.profile = profile
        self._width = BYTES_PER_ELEMENT[spec.train.dtype]
        self._communication = CommunicationBytes(profile, self._m, self._width, max(4, self._width))
        self._state = StateMemory(spec, self._kind, profile, self._communication)
        self._is_muon = isinstance(spec.train.optimizer, MuonSpec)
        self.state_bytes = cache(self._state_bytes)
        self.update_bytes = cache(self._update_bytes)
        self._non_state_bytes_of_run = cache(self._sum_non_state)
        self._unit_state_bytes = cache(self._sum_state)
        self._share_non_state = cache(self._non_state_of_share)

    def estimate(self, candidate: Candidate) -> MemoryEstimate:
        """Bytes by kind on the fullest rank of the fullest stage."""
        distinct_stages = stages(self._units, PipelineChoices.from_candidate(candidate))
        return max((self._of_stage(stage, candidate) for stage in distinct_stages), key=lambda estimate: estimate.total)

    def by_pipeline_rank(self, candidate: Candidate) -> tuple[MemoryEstimate, ...]:
        """Bytes by kind on the fullest rank of each pipeline rank's stages."""
        every_stage = rank_stages(self._units, PipelineChoices.from_candidate(candidate))
        return tuple(self._of_stage(stage, candidate) for stage in every_stage)

    def _of_stage(self, stage: Stage, candidate: Candidate) -> MemoryEstimate:
        options = StateOptions.from_candidate(candidate)
        kinds: dict[str, int] = {
            **self._state.of_stage(stage, options)._asdict(),
            **self._non_state(stage, RunChoices.from_candidate(candidate))._asdict(),
        }
        kinds["workspace"] += max(0, self._stage_update_bytes(stage, options) - sum(kinds.values()))
        kinds["communication"] += kinds.pop("pipeline_buffers")
        return MemoryEstimate(**kinds, allowance=self.allowance, limit=self._limit)

    def _sum_state(self, of_units: tuple[tuple[Unit, int], ...], options: StateOptions) -> int:
        """State bytes of one stage, whatever its index and micro-batches."""
        return sum(self._state.of_stage(Stage(0, of_units), options))

    def total(self, candidate: Candidate) -> int:
        """Bytes on the fullest rank, allowance included."""
        state = self.state_bytes(StateOptions.from_candidate(candidate), PipelineChoices.from_candidate(candidate))
        fullest: int = max(map(add, state, self.non_state_bytes(candidate)))
        update = self.update_bytes(StateOptions.from_candidate(candidate), PipelineChoices.from_candidate(candidate))
        return max(fullest, *update) + self.allowance

    def _update_bytes(self, options: StateOptions, pipeline: PipelineChoices) -> tuple[int, ...]:
        """Bytes of each stage after its last backward pass: its state, and the only bucket of gradients, or temporary
        tensors of Muon, instead of activations."""
        distinct_stages = stages(self._units, pipeline)
        return tuple(self._stage_update_bytes(stage, options) for stage in distinct_stages)

    def _stage_update_bytes(self, stage: Stage, options: StateOptions) -> int:
        degrees, sharding, _ = options
        _, temporary = self._communication.buckets(
            degrees, sharding, self._state.counter.of_units(stage.units, degrees.shards)
        )
        if self._is_muon:
            of_muon = update_bytes(stage.units, degrees, self._kind, 8 if self._width == 8 else 2)
            temporary = max(temporary, of_muon)
        if not temporary:
            return 0
        state = self._state.of_stage(stage, options)
        return sum(state) - state.communication + temporary

    def non_state_bytes(self, candidate: Candidate) -> tuple[int, ...]:
        """Bytes of each stage other than its state, which parameter sharding does not change."""
        return self._non_state_bytes_of_run(RunChoices.from_candidate(candidate))

    def exceeds(self, candidate: Candidate, limit: float) -> bool:
        """Whether the candidate must exceed `limit` for any number of virtual stages, by single kinds of units."""
        options, usable = StateOptions.from_candidate(candidate), limit - self.allowance
        pairs = zip(self._shares(options.degrees.pipeline), self.non_state_shares(candidate), strict=True)
        return any(sum(self._state.of_stage(share, options)) + non_state > usable for share, non_state in pairs)

    def exceeds_unplaced(self, candidate: Candidate, usable_bytes: float) -> bool:
        """Whether it must exceed `usable_bytes` for any parameter sharding. Monotonic in the micro-batch size."""
        run, degrees = self._single_group_run(candidate), candidate.degrees
        options = StateOptions(degrees, "parameters", candidate.options.recompute == "full")
        return any(
            self._even_share(share, options) + self._share_non_state(share, run) > usable_bytes
            for share in reversed(self._shares(degrees.pipeline))
        )

    def non_state_shares(self, candidate: Candidate) -> tuple[int, ...]:
        """Lower bound of bytes other than state, by share of a stage (`shares`), for any number of virtual stages.
        Monotonic in the micro-batch size."""
        run = self._single_group_run(candidate)
        return tuple(self._share_non_state(share, run) for share in self._shares(run.pipeline.pipeline))

    def _single_group_run(self, candidate: Candidate) -> RunChoices:
        """The candidate's run with one token group per micro-batch and no virtual stages."""
        groups = -(-self._num_groups // candidate.degrees.data_ranks)
        pipeline = PipelineChoices(candidate.degrees.pipeline)
        return RunChoices.from_candidate(candidate)._replace(pipeline=pipeline, num_micro_batches=groups)

    def _shares(self, pipeline: int) -> tuple[Stage, ...]:
        return shares(self._units, pipeline, are_even=self._are_even)

    def _non_state_of_share(self, share: Stage, run: RunChoices) -> int:
        if share.index == run.pipeline.pipeline - 1:
            return self._min_non_state(share, run)
        return self._in_flight(share, run)

    def _min_non_state(self, share: Stage, run: RunChoices) -> int:
        """Lower bound of a share's bytes other than its state, on any stage, without buffers of all micro-batches: the
        first and last stages have fewer."""
        *buffers, messages = self._non_state(share, run)
        return sum(buffers) + (0 if self.profile.retained_pipeline_tensors == "all" else messages)

    def _even_share(self, share: Stage, options: StateOptions) -> int:
        """Lower bound of a share's state bytes, split evenly over its ranks. With float32 masters on the host,
        unsharded weights are narrower than sharded ones."""
        ((unit, count),) = share.units
        shardings: tuple[Sharding, ...] = ("parameters", "gradients") if self._state.is_offloaded else ("parameters",)
        return count * min(self._even_unit_share(unit, options._replace(sharding=sharding)) for sharding in shardings)

    def _even_unit_share(self, unit: Unit, options: StateOptions) -> int:
        dense, experts = self._state.min_of_unit(unit, options)
        return dense // options.degrees.replica_ranks + experts // options.degrees.data

    def _in_flight(self, share: Stage, run: RunChoices) -> int:
        """Activation bytes of a share's micro-batches in flight, for any number of token groups in one."""
        ((unit, count),) = share.units
        full, context = run.recompute == "full", run.split.context
        group_positions, all_at_once = (
            groups * self._group_tokens // unit.sides // context for groups in (1, run.groups)
        )
        groups = min(run.num_micro_batches, (run.pipeline.pipeline - share.index) * run.groups)
        if not full:
            return (
                count
                * groups
                * self._layers.layer_bytes(
                    unit, group_positions, run.split, run.recompute == "selective", run.context_exchange
                ).saved_bytes
            )
        recomputed = self._layers.layer_bytes(unit, all_at_once, run.split, False, run.context_exchange)
        saved_bytes = self._width * group_positions * self._m // run.split.tensor
        return (
            count * groups * saved_bytes
            + recomputed.saved_bytes
            + recomputed.workspace
            - self._width * all_at_once * self._m // run.split.tensor
        )

    def share_state_bytes(self, options: StateOptions) -> tuple[int, ...]:
        """Lower bound of the state bytes of each share."""
        unit_counts = [share.units[0] for share in self._shares(options.degrees.pipeline)]
        of_unit = {unit: sum(self._state.min_of_unit(unit, options)) for unit in dict(unit_counts)}
        return tuple(count * of_unit[unit] for unit, count in unit_counts)

    def min_state_bytes(self, shape: Degrees) -> int:
        """Lower bound of a rank's state bytes under these degrees, for any parameter sharding and perfectly even
        stages."""
        options = StateOptions(shape, "parameters", recomputes_blocks=True)
        unit_counts = stages(self._units, PipelineChoices())[0].units
        return sum(self._even_share(Stage(0, (unit_count,)), options) for unit_count in unit_counts) // shape.pipeline

    def min_workers(self, pipeline: int, split: WorkSplit, recompute: Recompute, *, overlaps: bool) -> float:
        """Lower bound of the number of workers, for any parameter sharding, from even shares in micro-batches of one
        token group; infinite if what more workers do not divide takes too much.

        That is two layers' weights gathered by FSDP, or narrow copies of all weights if smaller (no sharding avoids
        both); and the narrow copies, if layers cast all weights themselves.
        """
        run = RunChoices(PipelineChoices(pipeline), split, 1, 1, recompute, overlaps, "ring")
        width, narrow = self._state.width, self._state.narrow_width
        fewest = 1.0
        for share in self._shares(pipeline):
            if share.index < pipeline - 1:
                continue
            ((unit, count),) = share.units
            state = self._state.counter.of_unit(unit, ShardCounts(split.tensor, 1, split.expert, split.expert_tensor))
            gathered_width = min(2, count) * (width if self.profile.gathers_in_float32 else self._width)
            stays = state.used.total * min(gathered_width, count * (narrow or width))
            if recompute != "full" and unit.is_layer and self.profile.casts_weights_at_use:
                stays = max(stays, state.used.total * count * narrow)
            free_bytes = self._limit - self.allowance - self._min_non_state(share, run) - stays
            dense, experts = (
                count * ((width + self._state.average_width) * num_trained + self._state.moment_width * optimizer)
                for num_trained, optimizer in zip(state.trained_stored, state.optimizer, strict=True)
            )
            parts = dense * split.tensor + experts * split.expert * split.expert_tensor
            if free_bytes < 0 or (parts and not free_bytes):
                return inf
            fewest = max(fewest, pipeline * parts / max(1, free_bytes))
        return fewest

    def _state_bytes(self, options: StateOptions, pipeline: PipelineChoices) -> tuple[int, ...]:
        distinct_stages = stages(self._units, pipeline)
        return tuple(self._unit_state_bytes(stage.units, options) for stage in distinct_stages)

    def _sum_non_state(self, run: RunChoices) -> tuple[int, ...]:
        distinct_stages = stages(self._units, run.pipeline)
        return tuple(sum(self._non_state(stage, run)) for stage in distinct_stages)

    def _non_state(self, stage: Stage, run: RunChoices) -> _NonStateBytes:
        """Saved activations, workspace, logits and pipeline buffers of one stage."""
        width, (tensor, context, *_) = self._width, run.split
        activations = dispatch = logits = loss_bytes = freed = recomputed_input = 0
        largest = _NOTHING
        full, selective = run.recompute == "full", run.recompute == "selective"
        for unit, count in stage.units:
            positions = run.groups * self._group_tokens // unit.sides // context
            if unit.vocabulary is not None:
                logits, loss_bytes = self._layers.logit_bytes(positions // tensor, unit, tensor)
                # The loss's tensors are freed before the backward pass reaches a layer. With two stacks they stand for
                # the first stack's output and its gradient, which all layers of the second one keep.
                freed = logits if self.profile.chunks_logits and unit.sides == 1 else 0
            if not unit.is_layer:
                continue
            layer = self._layers.layer_bytes(unit, positions, run.split, selective, run.context_exchange)
            if full:  # each layer's input, and one recomputed layer, whose saved tensors include its input
                one_input = width * positions * self._m // tensor
                activations += count * one_input
                if layer.saved_bytes + layer.workspace > largest.saved_bytes + largest.workspace:
                    largest, recomputed_input = layer, one_input
            else:
                activations += count * layer.activations
                dispatch += count * layer.dispatch
                if layer.workspace > largest.workspace:
                    largest = layer
        # Each virtual stage makes the masks of a micro-batch anew.
        masks = self._layers.attention_mask_bytes(
            stage, run.groups * self._group_tokens // context, context, run.context_exchange
        )
        activations += run.pipeline.virtual_stages * masks
        num_in_flight = in_flight(stage.index, run.pipeline, run.num_micro_batches)
        waiting = run.overlap + num_in_flight
        tokens = run.groups * self._group_tokens // context // tensor
        return _NonStateBytes(
            activations=int(waiting * activations) + full * (largest.activations - recomputed_input),
            dispatch=int(waiting * dispatch) + full * largest.dispatch,
            workspace=max(loss_bytes, largest.workspace - freed),
            logits=logits,
            pipeline_buffers=self._communication.messages(stage, run, tokens),
        )
