"""State bytes of a pipeline stage: parameters, gradients and optimizer state, with what their sharding communicates."""

from functools import cache
from typing import NamedTuple

from moe.plan.candidate import Sharding
from moe.plan.cost.communication_bytes import CommunicationBytes
from moe.plan.cost.layer_bytes import BYTES_PER_ELEMENT
from moe.plan.cost.run_choices import StateOptions
from moe.plan.cost.stages import Stage
from moe.plan.cost.state import Elements, StateCounter, StateElements
from moe.plan.cost.units import Unit
from moe.plan.degrees import Degrees, ShardCounts
from moe.plan.profile import Profile
from moe.spec import AdamWSpec, JobSpec


def moment_bytes(spec: JobSpec) -> int:
    """Bytes per element of optimizer state, as `state_elements` counts them."""
    moments = spec.train.optimizer.moments if isinstance(spec.train.optimizer, AdamWSpec) else "float32"
    return {"bfloat16": 2, "8bit": 1}.get(moments, max(4, BYTES_PER_ELEMENT[spec.train.dtype]))


def on_host(spec: JobSpec, kind: str) -> bool:
    """Whether the optimizer state is offloaded to host memory."""
    return isinstance(spec.train.optimizer, AdamWSpec) and spec.train.optimizer.offload and kind != "cpu"


class StateBytes(NamedTuple):
    """Bytes of one stage on its fullest rank."""

    parameters: int
    gradients: int
    optimizer: int
    communication: int
    staging: int


def _of_unsharded_axes(elements: Elements, degrees: Degrees) -> int:
    """Elements of weights that no data ranks share."""
    return (degrees.fsdp == 1) * elements.dense + (degrees.expert_fsdp == 1) * elements.in_experts


class StateMemory:
    """State of one job's stages on devices of one kind."""

    def __init__(self, spec: JobSpec, kind: str, profile: Profile, communication: CommunicationBytes) -> None:
        self._kind, self._profile, self._communication = kind, profile, communication
        self._m, self._width = spec.model.model_dim, BYTES_PER_ELEMENT[spec.train.dtype]
        self.width = max(4, self._width)
        """Weights, gradients and moments are at least float32, even if the compute dtype is narrower."""
        self.average_width = 0 if spec.train.ema_decay is None else self.width
        self.is_offloaded = on_host(spec, kind)
        self.moment_width, self._master_width = (0, 0) if self.is_offloaded else (moment_bytes(spec), self.width)
        # The frozen base of an adapter takes memory even if the job names no folder to load it from.
        self._keeps_frozen = getattr(spec.model, "adapter", None) is not None
        self._copies_of_weights = 2 if spec.has_frozen_reference else 1
        self.counter = StateCounter(spec.train.optimizer)
        self._min_of_part = cache(self._bytes_of_part)

    @property
    def narrow_width(self) -> int:
        """Bytes per element of weight copies in the compute dtype; 0 if weights are in it themselves."""
        return self._width if self._width < self.width else 0

    def of_stage(self, stage: Stage, options: StateOptions) -> StateBytes:
        """State bytes of one stage."""
        degrees, sharding, recomputes = options
        state, width = self.counter.of_units(stage.units, degrees.shards), self.width
        narrow = self.narrow_width
        optimizer = self.moment_width * state.optimizer + self.average_width * state.trained_stored.total
        saved_optimizer = optimizer
        stored_elements, trained_elements = state.stored, state.trained_stored
        if sharding != "parameters":
            stored_elements, trained_elements = state.used, state.trained_used
        gradients = state.trained_used if sharding == "optimizer" else state.trained_stored
        num_unsaved = 0
        if sharding != "parameters" and narrow and self._profile.sharded_master_weights == "all":
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
            parameters = width * stored_elements.total + narrow * self._narrow_elements(state, degrees, recomputes)
        codes = state.coded_stored if sharding == "parameters" else state.coded_used
        saved_codes = 0 if self._keeps_frozen else codes.total
        saved_elements = trained_elements if self._keeps_frozen else stored_elements
        saved_bytes = width * (saved_elements.total - num_unsaved) + saved_optimizer + saved_codes
        return StateBytes(
            parameters=self._copies_of_weights * (parameters + codes.total),
            gradients=width * gradients.total + self._separate_gradient_bytes(state, stage, degrees),
            optimizer=optimizer,
            communication=self._communication.total(degrees, sharding, state),
            staging=saved_bytes if self._kind == "cpu" else 0,
        )

    def _narrow_elements(self, state: StateElements, degrees: Degrees, recomputes: bool) -> int:
        """Elements of weight copies in the compute dtype. Cast at use, they live until the backward pass: all
        layers', or one's under full recomputation. Otherwise only ungathered weights have copies, cast once a step."""
        if self._profile.casts_weights_at_use:
            return state.largest_layer if recomputes else state.in_layers
        return _of_unsharded_axes(state.used, degrees)

    def _separate_gradient_bytes(self, state: StateElements, stage: Stage, degrees: Degrees) -> int:
        """Bytes of raw weight gradients before accumulation: of one layer and of the logits' table. Experts' are
        workspace."""
        if not self._profile.has_separate_weight_gradients:
            return 0
        vocabulary = sum(unit.vocabulary or 0 for unit, _ in stage.units)
        return self._width * (state.largest.dense + self._m * -(-vocabulary // degrees.tensor))

    def min_of_unit(self, unit: Unit, options: StateOptions) -> tuple[int, int]:
        """Lower bound of a unit's state bytes: (outside experts, in experts)."""
        degrees, sharding, recomputes = options
        dense = self._min_of_part(unit, False, ShardCounts(degrees.tensor, degrees.fsdp), sharding, recomputes)
        if unit.moe is None:
            return dense, 0
        shards = ShardCounts(1, 1, degrees.expert, degrees.expert_tensor, degrees.expert_fsdp)
        return dense, self._min_of_part(unit, True, shards, sharding, recomputes)

    def _bytes_of_part(
        self, unit: Unit, of_experts: bool, shards: ShardCounts, sharding: Sharding, recomputes: bool
    ) -> int:
        """State bytes of a unit's experts or of its other weights, without FSDP's temporary gathers."""
        state = self.counter.of_part(unit, of_experts, shards)
        width = self.width
        narrow = self.narrow_width
        gradients = state.trained_used if sharding == "optimizer" else state.trained_stored
        has_narrow_copy = unit.is_layer and self._profile.casts_weights_at_use and not recomputes
        if sharding == "parameters":
            weights = width * state.stored + has_narrow_copy * narrow * state.used + state.coded_stored
        elif narrow and self._profile.sharded_master_weights == "all":
            weights = narrow * state.used + self._master_width * state.stored + state.coded_used
        elif narrow:
            is_sharded = max(shards.fsdp, shards.expert_fsdp) > 1
            num_masters = is_sharded * state.matrices_used  # of whose wide values a rank has a shard alone
            weights = (width + has_narrow_copy * narrow) * (state.used - num_masters) + state.coded_used
            weights += narrow * num_masters + is_sharded * width * state.matrices_stored
        else:
            weights = width * state.used + state.coded_used
        optimizer = self.moment_width * state.optimizer + self.average_width * state.trained_stored
        return weights + width * gradients + optimizer
