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
from moe.plan.cost.run_choices import RunChoices, StateOptions, placed_of
from moe.plan.cost.stages import PipelineChoices, Stage, in_flight, rank_stages, shares, stages
from moe.plan.cost.state import Elements, StateCounter, StateElements
from moe.plan.cost.units import Unit, units
from moe.plan.degrees import Degrees, ShardCounts, WorkSplit
from moe.plan.plan import MemoryEstimate
from moe.plan.profile import Profile
from moe.spec import AdamWSpec, JobSpec, MuonSpec

ALLOWANCE = 0.1
"""Share of device memory reserved for the framework and fragmentation."""


def moment_bytes(spec: JobSpec) -> int:
    """Bytes per element of optimizer state, as `state_elements` counts them."""
    moments = spec.train.optimizer.moments if isinstance(spec.train.optimizer, AdamWSpec) else "float32"
    return {"bfloat16": 2, "8bit": 1}.get(moments, max(4, BYTES_PER_ELEMENT[spec.train.dtype]))


def on_host(spec: JobSpec, kind: str) -> bool:
    """Whether the optimizer state is offloaded to host memory."""
    return isinstance(spec.train.optimizer, AdamWSpec) and spec.train.optimizer.offload and kind != "cpu"


class _StateBytes(NamedTuple):
    """State bytes of a stage."""

    parameters: int
    gradients: int
    optimizer: int
    communication: int
    staging: int


class _NonStateBytes(NamedTuple):
    """Bytes of a stage other than its state."""

    activations: int
    dispatch: int
    workspace: int
    logits: int
    boundary: int


_NOTHING = LayerBytes(0, 0, 0)


def _of_unsharded_axes(elements: Elements, degrees: Degrees) -> int:
    """Elements of weights that no data ranks share."""
    return (degrees.fsdp == 1) * elements.dense + (degrees.expert_fsdp == 1) * elements.in_experts


class MemoryModel:
    """Memory of one job's candidates on one cluster. `load_skew`: rows of the busiest expert over the mean."""

    def __init__(self, spec: JobSpec, cluster: Cluster, profile: Profile, load_skew: float = 1.0) -> None:
        self._limit, self._kind = cluster.memory_bytes, cluster.traits.kind
        self.allowance = int(ALLOWANCE * self._limit)
        self._num_groups, self._group_tokens = spec.num_groups, spec.group_tokens
        self._m, self._units = spec.model.model_dim, units(spec.model, profile, spec.train.freeze)
        # A requested cut need not be even; nor are the ranks of a V.
        self._are_even = spec.parallel.stages is None and spec.parallel.schedule != "zb_v"
        self._layers = LayerMemory(spec, self._kind, profile, load_skew)
        # The frozen base of an adapter takes memory even if the job names no folder to load it from.
        self._keeps_frozen = getattr(spec.model, "adapter", None) is not None
        self._copies_of_weights = 2 if spec.has_frozen_reference else 1
        self.profile = profile
        self._width = BYTES_PER_ELEMENT[spec.train.dtype]
        self._state_width = max(4, self._width)
        """Weights, gradients and moments are at least float32, even if the compute dtype is narrower."""
        self._communication = CommunicationBytes(profile, self._m, self._width, self._state_width)
        self._moment_width, self._master_width = moment_bytes(spec), self._state_width
        self._average_width = 0 if spec.train.ema_decay is None else self._state_width
        self._offloads = on_host(spec, self._kind)
        if self._offloads:
            self._moment_width = self._master_width = 0
        self._counter = StateCounter(spec.train.optimizer)
        self.of_state = cache(self._of_state)
        self._is_muon = isinstance(spec.train.optimizer, MuonSpec)
        self.in_update = cache(self._of_updates)
        self._sum_non_state_of_run = cache(self._sum_non_state)
        self._state_of_units = cache(self._sum_of_state)
        self._share_non_state = cache(self._non_state_of_share)
        self._least_of_part = cache(self._bytes_of_part)

    def estimate(self, candidate: Candidate) -> MemoryEstimate:
        """Bytes by kind on the fullest rank of the fullest stage."""
        distinct_stages = stages(self._units, PipelineChoices.from_candidate(candidate))
        return max((self._of_stage(stage, candidate) for stage in distinct_stages), key=lambda estimate: estimate.total)

    def by_pipeline_rank(self, candidate: Candidate) -> tuple[MemoryEstimate, ...]:
        """Bytes by kind on the fullest rank of each pipeline rank's stages."""
        every_stage = rank_stages(self._units, PipelineChoices.from_candidate(candidate))
        return tuple(self._of_stage(stage, candidate) for stage in every_stage)

    def _of_stage(self, stage: Stage, candidate: Candidate) -> MemoryEstimate:
        layout = placed_of(candidate)
        kinds: dict[str, int] = {
            **_StateBytes(*self._state(stage, layout))._asdict(),
            **_NonStateBytes(*self._non_state(stage, RunChoices.from_candidate(candidate)))._asdict(),
        }
        kinds["workspace"] += max(0, self._of_update(stage, layout) - sum(kinds.values()))
        kinds["communication"] += kinds.pop("boundary")
        return MemoryEstimate(**kinds, allowance=self.allowance, limit=self._limit)

    def _sum_of_state(self, of_units: tuple[tuple[Unit, int], ...], layout: StateOptions) -> int:
        """State bytes of one stage, whatever its index and micro-batches."""
        return sum(self._state(Stage(0, of_units), layout))

    def total(self, candidate: Candidate) -> int:
        """Bytes on the fullest rank, allowance included."""
        state = self.of_state(placed_of(candidate), PipelineChoices.from_candidate(candidate))
        fullest: int = max(map(add, state, self.non_state_bytes(candidate)))
        update = self.in_update(placed_of(candidate), PipelineChoices.from_candidate(candidate))
        return max(fullest, *update) + self.allowance

    def _of_updates(self, layout: StateOptions, pipeline: PipelineChoices) -> tuple[int, ...]:
        """Bytes of each stage after its last backward pass: its state, and the only bucket of gradients, or temporary
        tensors of Muon, instead of activations."""
        distinct_stages = stages(self._units, pipeline)
        return tuple(self._of_update(stage, layout) for stage in distinct_stages)

    def _of_update(self, stage: Stage, layout: StateOptions) -> int:
        degrees, sharding, _ = layout
        _, temporary = self._communication.buckets(
            degrees, sharding, self._counter.of_units(stage.units, degrees.shards)
        )
        if self._is_muon:
            of_muon = update_bytes(stage.units, degrees, self._kind, 8 if self._width == 8 else 2)
            temporary = max(temporary, of_muon)
        if not temporary:
            return 0
        state = _StateBytes(*self._state(stage, layout))
        return sum(state) - state.communication + temporary

    def non_state_bytes(self, candidate: Candidate) -> tuple[int, ...]:
        """Bytes of each stage other than its state, which parameter sharding does not change."""
        return self._sum_non_state_of_run(RunChoices.from_candidate(candidate))

    def exceeds(self, candidate: Candidate, limit: float) -> bool:
        """Whether the candidate must exceed `limit` for any number of virtual stages, by single kinds of units."""
        layout, usable = placed_of(candidate), limit - self.allowance
        pairs = zip(self._shares(layout.degrees.pipeline), self.non_state_shares(candidate), strict=True)
        return any(sum(self._state(share, layout)) + non_state > usable for share, non_state in pairs)

    def exceeds_unplaced(self, candidate: Candidate, usable_bytes: float) -> bool:
        """Whether it must exceed `usable_bytes` for any parameter sharding. Monotonic in the micro-batch size."""
        run, degrees = self._single_group_run(candidate), candidate.degrees
        layout = StateOptions(degrees, "parameters", candidate.options.recompute == "full")
        return any(
            self._even_part(share, layout) + self._share_non_state(share, run) > usable_bytes
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
            return self._least_non_state(share, run)
        return self._in_flight(share, run)

    def _least_non_state(self, share: Stage, run: RunChoices) -> int:
        """Lower bound of a share's bytes other than its state, on any stage, without buffers of all micro-batches: the
        first and last stages have fewer."""
        *buffers, messages = self._non_state(share, run)
        return sum(buffers) + (0 if self.profile.kept_messages == "all" else messages)

    def _even_part(self, share: Stage, layout: StateOptions) -> int:
        """Lower bound of a share's state bytes, split evenly over its ranks. With float32 masters on the host,
        unsharded weights are narrower than sharded ones."""
        ((unit, count),) = share.units
        shardings: tuple[Sharding, ...] = ("parameters", "gradients") if self._offloads else ("parameters",)
        return count * min(self._even_part_of(unit, layout._replace(sharding=sharding)) for sharding in shardings)

    def _even_part_of(self, unit: Unit, layout: StateOptions) -> int:
        dense, experts = self._least_of_unit(unit, layout)
        return dense // layout.degrees.replica_ranks + experts // layout.degrees.data

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

    def state_of_shares(self, options: StateOptions) -> tuple[int, ...]:
        """Lower bound of the state bytes of each share."""
        unit_counts = [share.units[0] for share in self._shares(options.degrees.pipeline)]
        of_unit = {unit: sum(self._least_of_unit(unit, options)) for unit in dict(unit_counts)}
        return tuple(count * of_unit[unit] for unit, count in unit_counts)

    def bound_of_state(self, shape: Degrees) -> int:
        """Lower bound of a rank's state bytes under these degrees, for any parameter sharding and perfectly even
        stages."""
        layout = StateOptions(shape, "parameters", recomputes_blocks=True)
        unit_counts = stages(self._units, PipelineChoices())[0].units
        return sum(self._even_part(Stage(0, (unit_count,)), layout) for unit_count in unit_counts) // shape.pipeline

    def fewest_workers(self, pipeline: int, split: WorkSplit, recompute: Recompute, *, overlaps: bool) -> float:
        """Lower bound of the number of workers, for any parameter sharding, from even shares in micro-batches of one
        token group; infinite if what more workers do not divide takes too much.

        That is two layers' weights gathered by FSDP, or narrow copies of all weights if smaller (no sharding avoids
        both); and the narrow copies, if layers cast all weights themselves.
        """
        run = RunChoices(PipelineChoices(pipeline), split, 1, 1, recompute, overlaps, "ring")
        width, narrow = self._state_width, self._width if self._width < self._state_width else 0
        fewest = 1.0
        for share in self._shares(pipeline):
            if share.index < pipeline - 1:
                continue
            ((unit, count),) = share.units
            state = self._counter.of_unit(unit, ShardCounts(split.tensor, 1, split.expert, split.expert_tensor))
            gathered_width = min(2, count) * (width if self.profile.gathers_wide else self._width)
            stays = state.used.total * min(gathered_width, count * (narrow or width))
            if recompute != "full" and unit.is_layer and self.profile.narrows_at_use:
                stays = max(stays, state.used.total * count * narrow)
            room = self._limit - self.allowance - self._least_non_state(share, run) - stays
            dense, experts = (
                count * ((width + self._average_width) * num_trained + self._moment_width * optimizer)
                for num_trained, optimizer in zip(state.trained_stored, state.optimizer, strict=True)
            )
            parts = dense * split.tensor + experts * split.expert * split.expert_tensor
            if room < 0 or (parts and not room):
                return inf
            fewest = max(fewest, pipeline * parts / max(1, room))
        return fewest

    def _least_of_unit(self, unit: Unit, layout: StateOptions) -> tuple[int, int]:
        """Lower bound of a unit's state bytes: (outside experts, in experts)."""
        degrees, sharding, recomputes = layout
        dense = self._least_of_part(unit, False, ShardCounts(degrees.tensor, degrees.fsdp), sharding, recomputes)
        if unit.moe is None:
            return dense, 0
        shards = ShardCounts(1, 1, degrees.expert, degrees.expert_tensor, degrees.expert_fsdp)
        return dense, self._least_of_part(unit, True, shards, sharding, recomputes)

    def _bytes_of_part(
        self, unit: Unit, of_experts: bool, shards: ShardCounts, sharding: Sharding, recomputes: bool
    ) -> int:
        """State bytes of a unit's experts or of its other weights, without FSDP's temporary gathers."""
        state = self._counter.of_part(unit, of_experts, shards)
        width = self._state_width
        narrow = self._width if self._width < width else 0
        gradients = state.trained_used if sharding == "optimizer" else state.trained_stored
        has_narrow_copy = unit.is_layer and self.profile.narrows_at_use and not recomputes
        if sharding == "parameters":
            weights = width * state.stored + has_narrow_copy * narrow * state.used + state.coded_stored
        elif narrow and self.profile.sharded_masters == "all":
            weights = narrow * state.used + self._master_width * state.stored + state.coded_used
        elif narrow:
            is_sharded = max(shards.fsdp, shards.expert_fsdp) > 1
            num_masters = is_sharded * state.matrices_used  # of whose wide values a rank has a shard alone
            weights = (width + has_narrow_copy * narrow) * (state.used - num_masters) + state.coded_used
            weights += narrow * num_masters + is_sharded * width * state.matrices_stored
        else:
            weights = width * state.used + state.coded_used
        optimizer = self._moment_width * state.optimizer + self._average_width * state.trained_stored
        return weights + width * gradients + optimizer

    def _of_state(self, layout: StateOptions, pipeline: PipelineChoices) -> tuple[int, ...]:
        distinct_stages = stages(self._units, pipeline)
        return tuple(self._state_of_units(stage.units, layout) for stage in distinct_stages)

    def _sum_non_state(self, run: RunChoices) -> tuple[int, ...]:
        distinct_stages = stages(self._units, run.pipeline)
        return tuple(sum(self._non_state(stage, run)) for stage in distinct_stages)

    def _state(self, stage: Stage, layout: StateOptions) -> tuple[int, int, int, int, int]:
        """State bytes of one stage, in the field order of `_StateBytes`."""
        degrees, sharding, recomputes = layout
        state, width = self._counter.of_units(stage.units, degrees.shards), self._state_width
        narrow = self._width if self._width < width else 0
        optimizer = self._moment_width * state.optimizer + self._average_width * state.trained_stored.total
        saved_optimizer = optimizer
        stored, trained = state.stored, state.trained_stored
        if sharding != "parameters":
            stored, trained = state.used, state.trained_used
        gradients = state.trained_used if sharding == "optimizer" else state.trained_stored
        num_unsaved = 0
        if sharding != "parameters" and narrow and self.profile.sharded_masters == "all":
            parameters = narrow * state.used.total
            optimizer += self._master_width * state.stored.total
        elif sharding != "parameters" and narrow:
            num_used, num_stored = (
                (degrees.fsdp > 1) * matrices.dense + (degrees.expert_fsdp > 1) * matrices.in_experts
                for matrices in (state.matrices_used, state.matrices_stored)
            )
            num_copied = max(
                num_used + _of_unsharded_axes(state.largest, degrees), self._narrow_elements(state, degrees, recomputes)
            )
            parameters = width * (state.used.total - num_used) + narrow * num_copied
            optimizer += width * num_stored
            num_unsaved = num_used - num_stored  # the other ranks' masters
        else:
            parameters = width * stored.total + narrow * self._narrow_elements(state, degrees, recomputes)
        codes = state.coded_stored if sharding == "parameters" else state.coded_used
        saved_codes = 0 if self._keeps_frozen else codes.total
        saved_elements = trained if self._keeps_frozen else stored
        return (
            self._copies_of_weights * (parameters + codes.total),
            width * gradients.total + self._passing(state, stage, degrees),
            optimizer,
            self._communication.total(degrees, sharding, state),
            width * (saved_elements.total - num_unsaved) + saved_optimizer + saved_codes if self._kind == "cpu" else 0,
        )

    def _narrow_elements(self, state: StateElements, degrees: Degrees, recomputes: bool) -> int:
        """Elements of weight copies in the compute dtype. Cast at use, they live until the backward pass: all
        layers', or one's under full recomputation. Otherwise only ungathered weights have copies, cast once a step."""
        if self.profile.narrows_at_use:
            return state.largest_layer if recomputes else state.in_layers
        return _of_unsharded_axes(state.used, degrees)

    def _passing(self, state: StateElements, stage: Stage, degrees: Degrees) -> int:
        """Bytes of raw weight gradients before accumulation: of one layer and of the logits' table. Experts' are
        workspace."""
        if not self.profile.passes_gradients:
            return 0
        vocabulary = sum(unit.vocabulary or 0 for unit, _ in stage.units)
        return self._width * (state.largest.dense + self._m * -(-vocabulary // degrees.tensor))

    def _non_state(self, stage: Stage, run: RunChoices) -> tuple[int, int, int, int, int]:
        """Saved activations, workspace, logits and pipeline buffers, in the field order of `_NonStateBytes`."""
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
                freed = logits if self.profile.logits_in_parts and unit.sides == 1 else 0
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
        return (
            int(waiting * activations) + full * (largest.activations - recomputed_input),
            int(waiting * dispatch) + full * largest.dispatch,
            max(loss_bytes, largest.workspace - freed),
            logits,
            self._communication.messages(stage, run, tokens),
        )
