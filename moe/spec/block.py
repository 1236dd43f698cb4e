"""The blocks of a model: parameters that are used together, and the widths that their arithmetic has."""

from collections.abc import Iterator
from dataclasses import dataclass

from moe.spec.moe import MoESpec
from moe.spec.parameter import Parameter


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
    linear: int = 0
    """Width of a head's values where a state of fixed size stands for keys and values: positions then cost the same at
    any length."""


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
