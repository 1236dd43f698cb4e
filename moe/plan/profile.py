"""Profiles of executors: the differences between ours and those of published runs on which costs depend."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from moe.spec.parameter import Dim

Axis = Literal["tensor", "fsdp", "expert", "expert_tensor", "expert_fsdp"]
"""Mesh axis that a parameter is split over."""

Axes = Mapping[Dim, Axis]
"""Mesh axis that splits each logical dimension; none splits those that are left out."""

ProfileName = Literal["ours", "peer", "torchtitan", "torchtitan-25.06"]


@dataclass(frozen=True, eq=False)
class Profile:
    """One way to execute plans. The model's own facts are no part of it."""

    name: ProfileName
    axes: Axes
    kept_hidden: Mapping[int, int]
    """By the number of matrices, hidden widths kept of a feed-forward layer."""
    kept_shared: Mapping[int, int]
    """The same of shared experts."""
    worked_hidden: Mapping[int, int]
    """The same that the backward pass of a feed-forward layer holds beside."""
    recomputes_latents: bool
    """Whether selective recomputation makes queries, keys and values again that come from latents."""
    keeps_gathered_tokens: bool
    """Whether what tensor ranks gather of one another's tokens is kept for the backward pass, or gathered again."""
    gathers_wide: bool
    """Whether weights are gathered and gradients scattered in float32, or as narrow as the arithmetic."""
    narrows_at_use: bool
    """Whether layers narrow weights where they use them, and keep that until the backward pass; or once a step what is
    not gathered."""
    logits_in_parts: bool
    """Whether the loss has a few logits at a time, or all of them at once."""
    loss_bytes: tuple[int, int] | None
    """Bytes per logit while the loss of all logits is computed, on a rank with the whole vocabulary and on one with a
    share of it. None if gradients overwrite the logits."""
    passes_gradients: bool
    """Whether products give gradients in tensors of their own, to be added to what other micro-batches gave."""
    reduces_beside_backward: bool
    """Whether gradients are added up over replicas beside the backward pass, where they lie; or when it is over, laid
    end to end."""
    gathers_flat: bool
    """Whether FSDP gathers into flat buffers and copies the weights out of them. The buffers belong to a separate
    stream, so other tensors do not reuse their memory."""
    keeps_messages: bool
    """Whether pipeline stages keep the tensors that they receive and send, and the logits, of all micro-batches until
    the step ends."""

    @property
    def splits_vocabulary(self) -> bool:
        """Whether each tensor rank has a share of the logits of all tokens, or all logits of its share of tokens."""
        return "vocab" in self.axes


_AXES: Axes = {
    "heads": "tensor", "hidden": "tensor",
    "expert": "expert", "expert_hidden": "expert_tensor", "expert_output": "expert_tensor",
}  # fmt: skip

OURS = Profile(
    name="ours",
    axes=_AXES,
    kept_hidden={2: 1, 3: 2},  # what the first matrices gave
    kept_shared={2: 1, 3: 4},  # beside both products, the activated gate and the product of both
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
    kept_hidden={2: 1, 3: 3},  # one kernel activates the gate and weighs with it
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
"""Megatron-Core, whose runs were published."""

TORCHTITAN = replace(
    PEER,
    name="torchtitan",
    keeps_gathered_tokens=True,
    loss_bytes=(12, 16),
    gathers_flat=True,
    keeps_messages=True,
)
"""torchtitan as of December 2024, with FSDP2. Its loss is not compiled: it holds log-probabilities, their gradients and
those of the logits in float32, and one more tensor where tensor ranks share the vocabulary (`loss_parallel`). Linear
layers of a tensor group keep their gathered input. FSDP gathers on a separate stream, and pipeline stages have buffers
for all micro-batches (PyTorch's `_fsdp_collectives` and `pipelining.stage`)."""

TORCHTITAN_25_06 = replace(TORCHTITAN, name="torchtitan-25.06", loss_bytes=(4, 4))
"""torchtitan as of June 2025. Its loss is compiled: it holds logits and their gradients in the arithmetic's dtype."""

PROFILES: Mapping[ProfileName, Profile] = {
    profile.name: profile for profile in (OURS, PEER, TORCHTITAN, TORCHTITAN_25_06)
}


EXECUTORS: Mapping[ProfileName, str] = {
    "ours": "this library", "peer": "Megatron-Core", "torchtitan": "torchtitan",
    "torchtitan-25.06": "torchtitan",
}  # fmt: skip
"""Executors in words."""


def profile_of(name: ProfileName | None = None) -> Profile:
    """The profile of this name; ours where none is named."""
    return PROFILES[name or "ours"]
