"""Blocks of a model: parameters that are used together, and the dimensions of their computation."""

from collections.abc import Iterator
from dataclasses import dataclass

from moe.spec.moe import MoESpec
from moe.spec.parameter import Parameter


@dataclass(frozen=True)
class KeptWidths:
    """Elements per position that our attention saves for the backward pass; unless stated otherwise, of a tensor
    rank's heads and in the compute dtype."""

    fused: int
    """Inputs and outputs of fused attention."""
    fused_on_cpu: int
    """The same on a CPU, whose kernel needs values as wide as keys, and float32 if the compute dtype is narrower."""
    narrowed: int = 0
    """Outputs in the compute dtype, beside float32 ones on a CPU."""
    beside: int = 0
    wide: int = 0
    """In float32 or wider."""
    normed_together: int = 0
    """Inputs of norms over the heads of all tensor ranks; with several ranks, saved twice in float32."""
    of_tokens: int = 0
    """Per token of the rank's own, independent of its heads."""
    of_tokens_wide: int = 2
    """The same in float32: statistics of norms, two of them of the layer's own."""
    gathered: int = 0
    """Per token of the tensor group, not split over its ranks."""
    worked: int = 0
    """Temporary elements in the backward pass, in float32, for `worked_positions` of each row."""
    worked_positions: int = 0


@dataclass(frozen=True)
class AttentionDims:
    """Widths of an attention, summed over heads, that determine its cost."""

    queries: int
    keys: int
    """Keys, repeated for each query head."""
    values: int
    kept_keys_and_values: int
    """Keys and values as projected and saved; fewer if query heads share them."""
    projections: int
    """Projection weights that each position is multiplied by."""
    latent: int = 0
    """Latents and other saved tensors that tensor ranks do not split."""
    window: int | None = None
    """Sliding window, in positions."""
    causal: bool = True
    rotated: int = 0
    """Queries and keys saved a second time after RoPE."""
    gathered: int | None = None
    """Width of the all-gather into the layer; None for hidden states."""
    takes_own: bool = False
    """Whether a tensor rank projects its own tokens before the all-gather."""
    kept: KeptWidths | None = None
    """Tensors that our attention saves; None for queries, keys, values and outputs."""
    linear: int = 0
    """Value dimension of a head of linear attention, whose state has a fixed size; 0 for softmax attention. The cost
    per position does not depend on the length, and grows with `chunk`."""
    chunk: int = 0
    """Positions per chunk of linear attention."""
    heads: int = 1
    key_heads: int = 1
    """KV heads."""
    normed: bool = False
    """Whether queries and keys have norms (QK norm)."""


@dataclass(frozen=True)
class FeedForwardDims:
    """Dense feed-forward layer."""

    hidden: int
    num_matrices: int


@dataclass(frozen=True, eq=False)
class Block:
    """Parameters that are used together. Identical blocks are one object."""

    kind: str
    """Description: `embeddings`, `encoder layer with experts`, `head`."""
    parameters: tuple[Parameter, ...]
    tied: tuple[Parameter, ...] = ()
    """Parameters of another block that this one shares."""
    attentions: tuple[AttentionDims, ...] = ()
    """Empty unless the block is a layer."""
    feed_forward: FeedForwardDims | None = None
    moe: MoESpec | None = None
    vocabulary: int | None = None
    """Logits per position, of the head."""


Blocks = Iterator[tuple[str, Block]]
"""(path, block) pairs of a model, in execution order."""
