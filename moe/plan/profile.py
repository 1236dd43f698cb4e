"""Executor profiles: how the costs of our executor and of published runs differ."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from moe.spec.parameter import Dim

Axis = Literal["tensor", "fsdp", "expert", "expert_tensor", "expert_fsdp"]

Axes = Mapping[Dim, Axis]
"""Mesh axis of each logical dimension; missing ones are not split."""

BUCKET_BYTES = 32 << 20
"""Most bytes of gradients that our executor sums in one all-reduce, unless one alone is larger."""

ProfileName = Literal["ours", "peer", "torchtitan", "torchtitan-25.06"]


@dataclass(frozen=True, eq=False)
class Profile:
    """Memory and communication behaviour of an executor, independent of the model."""

    name: ProfileName
    axes: Axes
    saved_hidden: Mapping[int, int]
    """Tensors of hidden size that a feed-forward layer saves for the backward pass, by its number of matrices."""
    saved_shared_hidden: Mapping[int, int]
    """The same for shared experts."""
    backward_hidden: Mapping[int, int]
    """Temporary tensors of hidden size in the backward pass of a feed-forward layer."""
    recomputes_latents: bool
    """Whether selective recomputation includes queries, keys and values from latents."""
    saves_gathered_tokens: bool
    """Whether a tensor group's all-gathered tokens are saved, or gathered again."""
    gathers_in_float32: bool
    """Whether weights are gathered and gradients scattered in float32 or in the compute dtype."""
    casts_weights_at_use: bool
    """Whether layers cast weights at use and save the copies; otherwise ungathered weights are cast once per step."""
    sharded_master_weights: Literal["matrices", "all"]
    """Weights that are in the compute dtype, not sharded, if the optimizer's state is sharded, with their float32
    masters in that state; the others stay in float32. `matrices`: those of layers, without routers."""
    chunks_logits: bool
    """Whether the loss chunks the logits."""
    loss_bytes: tuple[int, int] | None
    """Bytes per logit of an unchunked loss, with the whole vocabulary and with a share of it; None if gradients
    overwrite the logits."""
    has_separate_weight_gradients: bool
    """Whether weight gradients are separate tensors before accumulation."""
    scatters_into_gathered_weights: bool
    """Whether reduce-scatters of gradients reuse the memory of the gathered weights."""
    bucket_bytes: int | None
    """Bytes of gradients that are copied and all-reduced together; None if gradients are reduced in place."""
    uses_flat_buffers: bool
    """Whether FSDP gathers into flat buffers and copies weights out. They belong to another stream: their memory is
    not reused."""
    retained_pipeline_tensors: Literal["none", "in_flight", "all"]
    """Hidden states that pipeline stages keep after sending them: none, those of micro-batches in flight, or of all
    micro-batches until the step ends, with received ones and the logits."""
    allows_layerless_stages: bool
    """Whether the first and the last pipeline stage may have the embeddings or the head alone."""

    @property
    def splits_vocabulary(self) -> bool:
        """Whether tensor ranks split the logits by vocabulary or by token."""
        return "vocab" in self.axes


_AXES: Axes = {
    "heads": "tensor", "hidden": "tensor",
    "expert": "expert", "expert_hidden": "expert_tensor", "expert_output": "expert_tensor",
}  # fmt: skip

OURS = Profile(
    name="ours",
    axes=_AXES,
    saved_hidden={2: 1, 3: 2},  # outputs of the first matrices
    saved_shared_hidden={2: 1, 3: 4},  # both outputs, the activated gate, the gated output
    backward_hidden={2: 2, 3: 3},  # hidden states and their gradient, and the activated gate
    recomputes_latents=False,
    saves_gathered_tokens=True,
    gathers_in_float32=True,
    casts_weights_at_use=True,
    sharded_master_weights="matrices",
    chunks_logits=True,
    loss_bytes=None,
    has_separate_weight_gradients=False,
    scatters_into_gathered_weights=True,
    bucket_bytes=BUCKET_BYTES,
    uses_flat_buffers=False,
    retained_pipeline_tensors="in_flight",
    allows_layerless_stages=False,
)

PEER = Profile(
    name="peer",
    axes={**_AXES, "vocab": "tensor"},
    saved_hidden={2: 1, 3: 3},  # one kernel activates the gate and multiplies by it
    saved_shared_hidden={2: 1, 3: 3},
    backward_hidden={2: 2, 3: 4},
    recomputes_latents=True,
    saves_gathered_tokens=False,
    gathers_in_float32=False,
    casts_weights_at_use=False,
    sharded_master_weights="all",
    chunks_logits=False,
    loss_bytes=None,
    has_separate_weight_gradients=True,
    scatters_into_gathered_weights=False,
    bucket_bytes=None,
    uses_flat_buffers=False,
    retained_pipeline_tensors="none",
    allows_layerless_stages=True,
)
"""Megatron-Core, as in published runs."""

TORCHTITAN = replace(
    PEER,
    name="torchtitan",
    saves_gathered_tokens=True,
    loss_bytes=(12, 16),
    uses_flat_buffers=True,
    retained_pipeline_tensors="all",
)
"""torchtitan of December 2024, with FSDP2. The uncompiled loss holds log-probabilities, their gradients and the
logits' in float32, and one more tensor under `loss_parallel`. Tensor-parallel linear layers save their gathered
input; FSDP gathers on another stream; pipeline stages buffer all micro-batches (PyTorch's `_fsdp_collectives`,
`pipelining.stage`)."""

TORCHTITAN_25_06 = replace(TORCHTITAN, name="torchtitan-25.06", loss_bytes=(4, 4))
"""torchtitan of June 2025. The compiled loss holds logits and their gradients in the compute dtype."""

PROFILES: Mapping[ProfileName, Profile] = {
    profile.name: profile for profile in (OURS, PEER, TORCHTITAN, TORCHTITAN_25_06)
}


EXECUTORS: Mapping[ProfileName, str] = {
    "ours": "this library", "peer": "Megatron-Core", "torchtitan": "torchtitan",
    "torchtitan-25.06": "torchtitan",
}  # fmt: skip


def find_profile(name: ProfileName | None = None) -> Profile:
    """Profile by name; ours by default."""
    return PROFILES[name or "ours"]
