"""Inputs of one forward pass over rows of tokens, for its layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from moe.layers.adapter_dropout import DropoutKey
from moe.layers.attention_mask import AttentionMask
from moe.layers.context_chunks import ChunkDocuments, ContextChunks
from moe.layers.draws import apply_dropout
from moe.layers.rotary import Pairing, rotate
from moe.parallel import ContextShard, SequenceShard
from moe.random import Purpose
from moe.routing import TokenContext
from moe.spec.language import QueryScaling

RotaryTable = tuple[Tensor, Tensor]
"""Cosines and sines of positions, `[B, 1, N, r/2]` each, at least float32."""


@dataclass(frozen=True)
class PassRows:
    """Rows of a pass: what attention needs in every layer. N positions of each row are on this context rank; in
    training and evaluation all ranks together have L, in decoding L counts cached positions too."""

    shard: SequenceShard
    """Sharding of the rows' tokens, without padding rows."""
    attention_mask: AttentionMask
    """Attention mask, including earlier positions of each row."""
    num_positions: int
    """Positions per row, including earlier ones."""
    rotary: RotaryTable | None = None
    """Cosines and sines of the positions; None without rotary embeddings."""
    local_rotary: RotaryTable | None = None
    """The same for layers with local attention."""
    query_scales: Mapping[QueryScaling, Tensor] = field(default_factory=dict)
    """Factors of queries by their positions, `[B, 1, N, 1]` each."""
    documents: Tensor | None = None
    """int `[B, L]`, or `[B, N]` in decoding: number of each position's document in its row, on all context ranks; -1
    for padding; None: each row is one document."""
    chunk_documents: ChunkDocuments | None = None
    """The same by chunk, if context ranks have parts of the rows."""
    dropout_key: DropoutKey | None = None
    """Key of the adapters' dropout for ids `[B, N]`, in training."""
    row_dropout_key: DropoutKey | None = None
    """The same for the ids `[B, L]` of all context ranks."""
    memory_mask: AttentionMask | None = None
    """Attention mask of cross-attention, over the encoder's positions."""
    batch_tokens: int | Tensor | None = None
    """Real tokens of the global batch, the denominator of the layers' own losses; None outside training."""
    selections: dict[int, Tensor | None] = field(default_factory=dict)
    """Selections of tokens by the layer that has the indexer, for the later layers that share them."""

    @property
    def context(self) -> ContextShard | None:
        """This context rank's positions; None if it has all."""
        return self.shard.context

    @property
    def chunks(self) -> ContextChunks | None:
        """This context rank's chunks, for recurrences along rows; None if it has all positions."""
        return None if self.context is None else ContextChunks(self.context, self.chunk_documents)

    @property
    def shard_dropout_key(self) -> DropoutKey | None:
        """Dropout key of this rank's share of the tokens."""
        if self.dropout_key is None:
            return None
        return replace(self.dropout_key, ids=self.dropout_key.ids.reshape(-1)[self.shard.first : self.shard.stop])

    def with_dropout_key(self, key: DropoutKey | None) -> "PassRows":
        """The same rows with a key for the ids `[B, L]` of all context ranks."""
        local_key = key
        if key is not None and self.context is not None:
            local_key = replace(key, ids=self.context.take(key.ids))
        return replace(self, dropout_key=local_key, row_dropout_key=key)

    def gather_positions(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Rows `[B, L, ...]` of the `parts` `[B, N, ...]` of all context ranks, which have one dtype."""
        return parts if self.context is None else self.context.gather(*parts)

    def with_label(self, label: str) -> "PassRows":
        """The same rows, with `label` as the layer's name in errors of collectives, if there are any."""
        if self.shard.is_whole:
            return self
        return replace(self, shard=self.shard.with_label(label))

    def rotate(self, x: Tensor, pairing: Pairing, *, is_local: bool = False) -> Tensor:
        """Rotary embedding of heads `x` `[B, n, N, d]`, with local attention if `is_local`; `x` itself without one."""
        table = self.local_rotary if is_local else self.rotary
        return x if table is None else rotate(x, *table, pairing)

    def scale_queries(self, queries: Tensor, scaling: QueryScaling | None) -> Tensor:
        """Multiply queries `[B, n, N, d]` by the factors of their positions, if there are any."""
        return queries if scaling is None else queries * self.query_scales[scaling].to(queries.dtype)

    def layer_mask(self, window: int | None, num_keys: int, *, in_chunks: bool = False) -> AttentionMask:
        """Attention mask of a layer with this window, or chunks of this length if `in_chunks`, whose cache has the last
        `num_keys` positions."""
        num_evicted = self.num_positions - num_keys
        if in_chunks and window is not None:
            is_one_chunk = self.num_positions <= window
            attention_mask = (
                self.attention_mask if is_one_chunk else self.attention_mask.with_chunk(window, num_evicted)
            )
        else:
            attention_mask = self.attention_mask.with_window(window)
        if attention_mask.first is None or not num_evicted:
            return attention_mask
        return replace(attention_mask, first=attention_mask.first - num_evicted, _cache={})


@dataclass(frozen=True)
class SequencePass:
    """Inputs of one forward pass, for every block of a stack."""

    tokens: TokenContext
    """Token ids and padding `[G, S]`: groups of whole rows, the last possibly padded."""
    rows: PassRows
    dropout: float = 0.0
    """Probability of dropout of embeddings and sub-layer outputs."""

    def for_layer(self, layer: int) -> "SequencePass":
        """The same pass, with the layer's name in errors of collectives, if there are any."""
        if self.rows.shard.is_whole:
            return self
        return replace(self, rows=self.rows.with_label(f"layer {layer}"))

    def drop(self, x: Tensor, layer: int, purpose: Purpose) -> Tensor:
        """Dropout on the shard `x` `[t, M]`, keyed by (seed, step, layer, purpose, token)."""
        if not self.tokens.training or self.dropout == 0:
            return x
        assert self.tokens.ids is not None
        shard = self.rows.shard
        ids = shard.take(self.tokens.ids.view(-1)[: shard.num_tokens])
        return apply_dropout(x, self.dropout, ids, self.tokens, layer, purpose)
