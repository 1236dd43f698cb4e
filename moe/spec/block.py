"""The blocks of a model: parameters that are used together, and the widths that their arithmetic has."""

from collections.abc import Iterator
from dataclasses import dataclass

from moe.spec.moe import MoESpec
from moe.spec.parameter import Parameter


@dataclass(frozen=True)
class KeptWidths:
    """Widths that our attention keeps of each position for its backward pass: of the heads of a tensor rank, as narrow
    as the arithmetic, where nothing else is said."""

    fused: int
    """Inputs and outputs of fused attention."""
    fused_on_cpu: int
    """The same on a CPU, whose kernel wants values as wide as keys; in float32, as few multiply narrower numbers."""
    narrowed: int = 0
    """Outputs once more, where it is computed in float32 and the rest is narrower."""
    beside: int = 0
    wide: int = 0
    """In float32 at least."""
    normed_together: int = 0
    """Inputs of norms over the heads of all tensor ranks: where there are several, kept twice in float32."""
    of_tokens: int = 0
    """Of a rank's own tokens, whatever heads it has."""
    of_tokens_wide: int = 2
    """Likewise, in float32: the numbers that norms keep of a row, the layer's own two among them."""
    gathered: int = 0
    """Of all tokens, on each tensor rank."""
    worked: int = 0
    """In float32, what a backward pass holds beside for a while, of `worked_positions` of each row."""
    worked_positions: int = 0


@dataclass(frozen=True)
class AttentionDims:
    """Widths of an attention, summed over heads: its cost depends on them."""

    queries: int
    keys: int
    """As the heads see them."""
    values: int
    kept_keys_and_values: int
    """As they are projected and kept: fewer where heads share them."""
    projections: int
    """Weights that each position is multiplied by."""
    latent: int = 0
    """Widths of latents and of what else is kept beside, which tensor ranks do not split."""
    window: int | None = None
    """Positions that a query looks back at most."""
    causal: bool = True
    rotated: int = 0
    """Widths of queries and keys that are kept once more, turned by their positions."""
    gathered: int | None = None
    """Widths that tensor ranks gather of one another's tokens; hidden states where None."""
    takes_own: bool = False
    """Whether a tensor rank projects hidden states of its own tokens, before they are gathered."""
    kept: KeptWidths | None = None
    """Widths that our attention keeps; queries, keys, values and what heads give where None."""
    linear: int = 0
    """Width of a head's values where a state of fixed size stands for keys and values: positions then cost the same at
    any length, the more the longer the chunks in which they are taken."""
    chunk: int = 0
    """Positions of such a chunk."""
    heads: int = 1
    key_heads: int = 1
    """Heads that keys and values are kept of."""
    normed: bool = False
    """Whether queries and keys have norms of their own."""


@dataclass(frozen=True)
class FeedForwardDims:
    """A feed-forward layer without experts."""

    hidden: int
    num_matrices: int


@dataclass(frozen=True, eq=False)
class Block:
    """Parameters that are used together. Blocks that are alike are one object."""

    kind: str
    """In words: `embeddings`, `encoder layer with experts`, `head`."""
    parameters: tuple[Parameter, ...]
    tied: tuple[Parameter, ...] = ()
    """Parameters of another block, used here too."""
    attentions: tuple[AttentionDims, ...] = ()
    """None in what is no layer."""
    feed_forward: FeedForwardDims | None = None
    moe: MoESpec | None = None
    vocabulary: int | None = None
    """Logits of each position, where it is the head."""


Blocks = Iterator[tuple[str, Block]]
"""Every block of a model with its path, in the order of use."""
