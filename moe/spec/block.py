"""Blocks of a model: parameters used together, and their dimensions."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moe.spec.moe import MoESpec
from moe.spec.parameter import Parameter


@dataclass(frozen=True)
class SavedWidths:
    """Elements per position that our attention saves for the backward pass; unless noted, for a tensor rank's heads and
    in the compute dtype."""

    fused_inputs_outputs: int
    """Inputs and outputs of fused attention."""
    fused_on_cpu: int
    """`fused_inputs_outputs` on a CPU: values as wide as keys, in float32 or wider."""
    narrow_outputs: int = 0
    """On a CPU, outputs in the compute dtype, in addition to those in float32."""
    unfused: int = 0
    """Tensors saved outside fused attention."""
    wide: int = 0
    """In float32 or wider."""
    normed_together: int = 0
    """Inputs of norms over the heads of all tensor ranks; with several ranks, twice in float32."""
    of_tokens: int = 0
    """Per token of the rank's own shard, independent of its heads."""
    of_tokens_wide: int = 2
    """`of_tokens` in float32: statistics of norms, including the layer's two."""
    gathered: int = 0
    """Per token of the tensor group, on each rank."""
    backward_temporaries: int = 0
    """Float32 temporaries of the backward pass, for `temporary_positions` of each row."""
    temporary_positions: int = 0


@dataclass(frozen=True)
class SelectionDims:
    """Sparse attention to tokens that an indexer chooses."""

    top_k: int
    """Tokens that a query attends to, at most."""
    heads: int
    """The indexer's heads; 0 in a layer that shares the selection of an earlier one."""
    head_dim: int
    is_trained: bool
    """Whether the indexer has a loss."""
    attends_to_all: bool
    """Whether queries attend to all tokens: the indexer's warm-up."""
    gathered_width: int
    """Width of a token's key and value that all heads share, where selected ones are gathered for each query."""
    gathered_key: int
    """The key's part of it."""


@dataclass(frozen=True)
class AttentionDims:
    """Widths of an attention that determine its cost, summed over heads."""

    queries: int
    keys: int
    """Keys, repeated for each query head."""
    values: int
    kept_keys_and_values: int
    """Keys and values as projected and saved: fewer if query heads share them."""
    projections: int
    """Projection weights."""
    latent: int = 0
    """Latents and other saved tensors that are not split over tensor ranks."""
    window: int | None = None
    in_chunks: bool = False
    """Whether the window is a chunk, in which queries attend to the chunk's earlier tokens."""
    causal: bool = True
    rotated_copies: int = 0
    """Queries and keys saved again after RoPE."""
    gathered: int | None = None
    """Width of the all-gather into the layer; None for hidden states."""
    projects_local_tokens: bool = False
    """Whether tensor ranks project only their own tokens, before the all-gather."""
    saved_widths: SavedWidths | None = None
    """None: queries, keys, values and outputs are saved."""
    chunk: int = 0
    """Positions per chunk of linear attention, whose cost per position does not depend on length; 0 for softmax
    attention."""
    state_flops: int = 0
    """FLOPs per position of linear attention that do not depend on `chunk`."""
    chunk_flops: int = 0
    """FLOPs per position for each position of its chunk."""
    heads: int = 1
    key_heads: int = 1
    has_qk_norms: bool = False
    """Whether it has QK norms."""
    selection: SelectionDims | None = None
    """None: queries attend to all tokens that the mask allows."""
    key_value_latent: int | None = None
    """Width of the latent and rotary keys from which each rank computes its heads' keys and values; None if they are
    projected directly."""

    def selects(self, sequence_tokens: float) -> bool:
        """Whether queries in sequences of this length attend only to tokens that an indexer chooses."""
        selection = self.selection
        return selection is not None and not selection.attends_to_all and selection.top_k < sequence_tokens

    def gathers(self, sequence_tokens: float) -> bool:
        """Whether selected tokens are gathered for each query, rather than others masked. An indexer with a loss needs
        the scores of all.

        Of 4,096 positions, 8 heads of 96 and 64 with latents of 256, on one EPYC core, forward and backward: gathering
        64 tokens each, a ninth of the operations, took 1.4 s instead of 2.4; 128, a fifth, 9.1 s instead of 4.9.
        """
        selection = self.selection
        if selection is None or not self.selects(sequence_tokens) or (selection.is_trained and selection.heads):
            return False
        masked = sequence_tokens / 2 * (self.queries + self.values) / self.heads
        return 8 * selection.top_k * selection.gathered_width < masked

    def sharing_selection(self) -> "AttentionDims":
        """The same layer without an indexer of its own."""
        if self.selection is None:
            return self
        return replace(self, selection=replace(self.selection, heads=0, head_dim=0))


@dataclass(frozen=True)
class FeedForwardDims:
    """Dense feed-forward layer."""

    hidden: int
    num_matrices: int


@dataclass(frozen=True, eq=False)
class Block:
    """Parameters used together. Identical blocks share one object."""

    kind: str
    """`embeddings`, `encoder layer with experts`, `head`."""
    parameters: tuple[Parameter, ...]
    tied_parameters: tuple[Parameter, ...] = ()
    """Parameters shared with another block."""
    attentions: tuple[AttentionDims, ...] = ()
    """Empty outside layers."""
    feed_forward: FeedForwardDims | None = None
    moe: MoESpec | None = None
    vocabulary: int | None = None
    caps_logits: bool = False
    extra_norms: int = 0
    """Norms of a layer in addition to the two before, or after, its attention and feed-forward layers."""


Blocks = Iterator[tuple[str, Block]]
"""(path, block) pairs of a model, in execution order."""
