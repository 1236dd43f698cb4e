"""Bytes that a rank's communication takes beside its state and activations: gathered weights, gradients in
reduce-scatter, buckets of an all-reduce, and messages between pipeline stages."""

from moe.plan.candidate import Sharding
from moe.plan.cost.run_choices import RunChoices
from moe.plan.cost.stages import Stage, in_flight
from moe.plan.cost.state import StateElements
from moe.plan.degrees import Degrees
from moe.plan.profile import Profile


class CommunicationBytes:
    """Bytes for one job. `width` and `state_width`: of an element of activations, and of weights and gradients."""

    def __init__(self, profile: Profile, model_dim: int, width: int, state_width: int) -> None:
        self._profile, self._model_dim, self._width, self._state_width = profile, model_dim, width, state_width

    def total(self, degrees: Degrees, sharding: Sharding, state: StateElements) -> int:
        """Weights gathered by FSDP, one layer's float32 gradients in reduce-scatter, and a bucket of an all-reduce."""
        dense, experts, gathers = degrees.fsdp > 1, degrees.expert_fsdp > 1, sharding == "parameters"
        code_bytes = gathers * (dense * state.coded_gathered.dense + experts * state.coded_gathered.in_experts)
        elements = gathers * (dense * state.gathered.dense + experts * state.gathered.in_experts)
        if self._profile.uses_flat_buffers:
            elements += _flat_elements(degrees, state)
        gathered_width = self._state_width if self._profile.gathers_in_float32 else self._width
        # `optimizer`: gradients are in flat buffers.
        needs_memory = sharding == "gradients" or (gathers and not self._profile.scatters_into_gathered_weights)
        scattered_elements = needs_memory * (dense * state.largest.dense + experts * state.largest.in_experts)
        scattered_bytes = self._state_width * scattered_elements
        buckets, _ = self.buckets(degrees, sharding, state)
        return gathered_width * elements + scattered_bytes + buckets + code_bytes

    def buckets(self, degrees: Degrees, sharding: Sharding, state: StateElements) -> tuple[int, int]:
        """Upper bounds of the largest bucket of gradients: (beside activations, after them). A bucket that has all
        gradients is complete when the backward pass ends."""
        if self._profile.bucket_bytes is None:
            return 0, 0
        num_reduced, largest, gathers = 0, 0, sharding == "parameters"
        if degrees.stage_workers > 1 and not (gathers and degrees.fsdp > 1):
            num_reduced += state.trained_used.dense
            largest = max(state.outside, state.largest.dense)
        if degrees.data > 1 and not (gathers and degrees.expert_fsdp > 1):
            num_reduced += state.trained_used.in_experts
            largest = max(largest, state.largest.in_experts // 2)  # at least two matrices
        num_bytes = self._state_width * num_reduced
        if num_bytes <= self._profile.bucket_bytes:
            return 0, num_bytes
        return min(num_bytes, max(self._state_width * largest, self._profile.bucket_bytes)), 0

    def messages(self, stage: Stage, run: RunChoices, tokens: int) -> int:
        """Bytes that a pipeline stage receives and sends, for `tokens` per micro-batch.

        Stages that keep no messages hold one micro-batch's input and output, forward and backward. Stages that keep
        messages in flight hold, per virtual stage, the arriving input and gradient of one micro-batch, and the outputs
        of all micro-batches in flight. Stages that keep all messages hold, for all micro-batches, buffers for inputs
        and output gradients, input gradients, and the last stage's logits. Inputs of micro-batches in flight are
        counted with the layers.
        """
        if run.pipeline.pipeline == 1:
            return 0
        hidden_bytes = self._width * tokens * self._model_dim
        if self._profile.retained_pipeline_tensors == "none":
            return 4 * hidden_bytes
        if self._profile.retained_pipeline_tensors == "in_flight":
            num_in_flight = in_flight(stage.index, run.pipeline, run.num_micro_batches)
            return int((2 + num_in_flight) * run.pipeline.virtual_stages * hidden_bytes)
        vocabulary = sum(unit.vocabulary or 0 for unit, _ in stage.units)
        kinds = 3 * run.pipeline.virtual_stages - (stage.index == 0) - (vocabulary > 0)
        return run.num_micro_batches * (kinds * hidden_bytes + self._width * tokens * vocabulary)


def _flat_elements(degrees: Degrees, state: StateElements) -> int:
    """Elements of FSDP's flat buffers: the weights outside layers or two layers' weights, whichever are more."""
    dense, experts = degrees.fsdp > 1, degrees.expert_fsdp > 1
    return max(dense * state.outside, dense * state.two_layers.dense + experts * state.two_layers.in_experts)
