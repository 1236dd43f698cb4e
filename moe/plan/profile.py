"""Executor profiles: cost-relevant differences between our executor and those of published runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from moe.spec.parameter import Dim

Axis = Literal["tensor", "fsdp", "expert", "expert_tensor", "expert_fsdp"]
"""Mesh axis that splits a parameter."""

Axes = Mapping[Dim, Axis]
"""Mesh axis that splits each logical dimension; missing dimensions are not split."""

ProfileName = Literal["ours", "peer", "torchtitan", "torchtitan-25.06"]


@dataclass(frozen=True, eq=False)
class Profile:
    """One way to execute plans, independent of the model."""

    name: ProfileName
    axes: Axes
    kept_hidden: Mapping[int, int]
    """Hidden-sized tensors that a feed-forward layer saves, by its number of matrices."""
    kept_shared: Mapping[int, int]
    """The same for shared experts."""
    worked_hidden: Mapping[int, int]
    """Hidden-sized temporary tensors in the backward pass of a feed-forward layer, by its number of matrices."""
    recomputes_latents: bool
    """Whether selective recomputation recomputes the queries, keys and values that derive from latents."""
    keeps_gathered_tokens: bool
    """Whether the all-gathered tokens of a tensor group are saved for the backward pass, or gathered again."""
    gathers_wide: bool
    """Whether weights are gathered and gradients scattered in float32, or in the compute dtype."""
    narrows_at_use: bool
    """Whether layers cast weights to the compute dtype at use and save the copies for the backward pass; otherwise
    weights that are not gathered are cast once a step."""
    logits_in_parts: bool
    """Whether the loss computes the logits in chunks, or all at once."""
    loss_bytes: tuple[int, int] | None
    """Bytes per logit while the loss of all logits is computed, on a rank with the whole vocabulary and on one with a
    share of it. None if gradients overwrite the logits."""
    passes_gradients: bool
    """Whether weight gradients are computed in separate tensors and then accumulated."""
    reduces_beside_backward: bool
    """Whether gradients are reduced over replicas during the backward pass, in place; otherwise after it, in flat
    buffers."""
    gathers_flat: bool
    """Whether FSDP gathers into flat buffers and copies the weights out of them. The buffers belong to a separate
    stream, so other tensors do not reuse their memory."""
    keeps_messages: bool
    """Whether pipeline stages keep the tensors that they receive and send, and the logits, of all micro-batches
    until the step ends."""

    @property
    def splits_vocabulary(self) -> bool:
        """Whether each tensor rank has a share of the vocabulary for all tokens, or the whole vocabulary for its
        share of tokens."""
        return "vocab" in self.axes


_AXES: Axes = {
    "heads": "tensor", "hidden": "tensor",
    "expert": "expert", "expert_hidden": "expert_tensor", "expert_output": "expert_tensor",
}  # fmt: skip

OURS = Profile(
    name="ours",
    axes=_AXES,
    kept_hidden={2: 1, 3: 2},  # outputs of the first matrices
    kept_shared={2: 1, 3: 4},  # both outputs, the activated gate, the gated output
    worked_hidden={2: 2, 3: 3},  # hidden states and their gradient, and the activated gate
    recomputes_latents=False,
    keeps_gathered_tokens=True,
    gathers_wide=True,
    narrows_at_use=True,
    logits_in_parts=True,
    loss_bytes=None,
    passes_gradients=False,
    reduces_beside_backward=False,
    gathers_flat=False,
    keeps_messages=False,
)
"""`moe.parallel`."""

PEER = Profile(
    name="peer",
    axes={**_AXES, "vocab": "tensor"},
    kept_hidden={2: 1, 3: 3},  # one kernel activates the gate and multiplies by it
    kept_shared={2: 1, 3: 3},
    worked_hidden={2: 2, 3: 4},
    recomputes_latents=True,
    keeps_gathered_tokens=False,
    gathers_wide=False,
    narrows_at_use=False,
    logits_in_parts=False,
    loss_bytes=None,
    passes_gradients=True,
    reduces_beside_backward=True,
    gathers_flat=False,
    keeps_messages=False,
)
"""Megatron-Core, as in published runs."""

TORCHTITAN = replace(
    PEER,
    name="torchtitan",
    keeps_gathered_tokens=True,
    loss_bytes=(12, 16),
    gathers_flat=True,
    keeps_messages=True,
)
"""torchtitan as of December 2024, with FSDP2. Its loss is not compiled: it holds log-probabilities, their gradients
and those of the logits in float32, and one more tensor if tensor ranks share the vocabulary (`loss_parallel`).
Linear layers of a tensor group save their gathered input. FSDP gathers on a separate stream, and pipeline stages
have buffers for all micro-batches (PyTorch's `_fsdp_collectives` and `pipelining.stage`)."""

TORCHTITAN_25_06 = replace(TORCHTITAN, name="torchtitan-25.06", loss_bytes=(4, 4))
"""torchtitan as of June 2025. Its loss is compiled: it holds logits and their gradients in the compute dtype."""

PROFILES: Mapping[ProfileName, Profile] = {
    profile.name: profile for profile in (OURS, PEER, TORCHTITAN, TORCHTITAN_25_06)
}


EXECUTORS: Mapping[ProfileName, str] = {
    "ours": "this library", "peer": "Megatron-Core", "torchtitan": "torchtitan",
    "torchtitan-25.06": "torchtitan",
}  # fmt: skip
"""Names of executors in messages."""


def profile_of(name: ProfileName | None = None) -> Profile:
    """Return the profile with this name, by default ours."""
    return PROFILES[name or "ours"]
