"""Sparse attention to tokens that an indexer chooses (DeepSeek sparse attention, arXiv 2512.02556, section 2.1).

Shapes: B rows, n query heads, N queries, the last of L positions, K selected tokens per query, d and dv head widths; of
the indexer h heads of width i. A selection is int32 `[B, N, K]`: positions in ascending order, padded on the left
with -1 to K entries.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from moe.layers.attention_mask import AttentionMask
from moe.layers.softmax_attention import attend
from moe.parallel import SequenceShard
from moe.spec.language.indexer import QUERIES_AT_ONCE, SCORES_AT_ONCE


@dataclass(frozen=True)
class IndexScores:
    """Index scores I `[B, N, L]` of N queries, from `first` on, for all L positions, in factors:
    I = Σ_j w_j · ReLU(q_j · k) / √i (equation 1)."""

    queries: Tensor
    """`[B, h, N, i]`"""
    keys: Tensor
    """`[B, L, i]`"""
    head_weights: Tensor
    """`[B, N, h]`, at least float32, divided by √h."""
    first: int = 0
    """Position of the first query."""

    def blocks(self) -> Iterator[slice]:
        """Blocks of queries whose scores are computed together."""
        rows, heads, num_queries, _ = self.queries.shape
        return query_blocks(num_queries, rows * heads * self.keys.shape[1])

    def compute(self, block: slice) -> Tensor:
        """Scores `[B, n, L]` of a block of queries up to the last one's position, in at least float32."""
        return (self.activations(block) * self.weights(block)).sum(dim=1)

    def activations(self, block: slice) -> Tensor:
        """ReLU(q_j · k) / √i, `[B, h, n, L]`."""
        keys = self.visible_keys(block)[:, None]
        products = self.queries[:, :, block].to(keys.dtype) @ keys.transpose(-1, -2)
        return products.mul_(self.keys.shape[-1] ** -0.5).relu_()

    def weights(self, block: slice) -> Tensor:
        """w_j, `[B, h, n, 1]`."""
        return self.head_weights[:, block].transpose(1, 2)[..., None]

    def visible_keys(self, block: slice) -> Tensor:
        """Keys `[B, L, i]` up to the last query's position."""
        return self.keys[:, : self.first + block.stop].to(self.head_weights.dtype)


def query_blocks(num_queries: int, scores_per_query: int) -> Iterator[slice]:
    """Blocks of queries that together have at most SCORES_AT_ONCE scores; an empty one without queries."""
    size = min(QUERIES_AT_ONCE, max(1, SCORES_AT_ONCE // max(1, scores_per_query)))
    return (slice(start, min(start + size, num_queries)) for start in range(0, max(1, num_queries), size))


def visible_keys(attention_mask: AttentionMask, first: int, block: slice, device: torch.device) -> Tensor:
    """bool `[B or 1, n, L]`: positions that a block of queries, counted from position `first`, may attend to, up to the
    last one's."""
    keys = torch.arange(first + block.stop, device=device)
    return attention_mask.is_visible(keys[first + block.start :, None], keys[None])[:, 0]


@torch.no_grad()
def select_tokens(scores: IndexScores, top_k: int, attention_mask: AttentionMask) -> Tensor:
    """Selection `[B, N, K]` of the visible tokens with the highest scores; of equal scores, the earlier token's."""
    rows, _, num_queries, _ = scores.queries.shape
    selection = scores.keys.new_full((rows, num_queries, top_k), -1, dtype=torch.int32)
    for block in scores.blocks():
        visible = visible_keys(attention_mask, scores.first, block, scores.keys.device)
        ranking = scores.compute(block).masked_fill(~visible, float("-inf")).sort(dim=-1, descending=True, stable=True)
        best, places = ranking.values[..., :top_k], ranking.indices[..., :top_k]
        places = torch.where(best > float("-inf"), places, -1).sort(dim=-1).values
        selection[:, block, top_k - places.shape[-1] :] = places.to(torch.int32)
    return selection


def selected_keys(selection: Tensor, num_keys: int) -> Tensor:
    """bool `[B, n, num_keys]`, True where a query attends to a key."""
    mask = torch.zeros((*selection.shape[:2], num_keys + 1), dtype=torch.bool, device=selection.device)
    places = torch.where(selection < 0, num_keys, selection).to(torch.int64)
    return mask.scatter_(-1, places, value=True)[..., :num_keys]


def attend_in_blocks(
    attend_in_block: Callable[..., Tensor], queries: Tensor, selection: Tensor, *shared: Tensor, row_elements: int = 0
) -> Tensor:
    """Concatenate `attend_in_block(block, queries, selection, *shared)`, `[B, n, b, dv]`, over blocks of b of the
    `queries` `[B, n, N, d]`, recomputed in the backward pass. `row_elements`: temporary elements per query.

    `attend_in_block` must hold no tensors, which recomputation of the whole layer would not free.
    """
    outputs = []
    for block in query_blocks(queries.shape[2], row_elements):
        inputs = block, queries[:, :, block], selection[:, block], *shared
        if torch.is_grad_enabled():
            outputs.append(checkpoint(attend_in_block, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(attend_in_block(*inputs))
    return torch.cat(outputs, dim=2)


def attend_to_selected(queries: Tensor, keys: Tensor, values: Tensor, selection: Tensor, *, scale: float) -> Tensor:
    """Return `[B, n, N, dv]`: softmax attention of `queries` `[B, n, N, d]` to the selected of `keys` `[B, n, L, d]`
    and `values` `[B, n, L, dv]`, by masks: the paper's mode for short sequences."""
    first = keys.shape[2] - queries.shape[2]
    return attend_in_blocks(partial(_attend_by_mask, first, scale), queries, selection, keys, values)


def _attend_by_mask(
    first: int, scale: float, block: slice, queries: Tensor, selection: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    stop = first + block.stop
    mask = AttentionMask(causal=False, keys=selected_keys(selection, stop))
    return attend(queries, keys[:, :, :stop], values[:, :, :stop], scale=scale, attention_mask=mask)


def attend_to_gathered(queries: Tensor, keys: Tensor, values: Tensor, selection: Tensor, *, scale: float) -> Tensor:
    """Return `[B, n, N, dv]`: softmax attention of a block of `queries` `[B, n, N, d]` to the selected of `keys`
    `[B, L, d]` and `values` `[B, L, dv]`, which all heads share, gathered for each query. The cost depends on K, not
    L."""
    rows, places = torch.arange(len(keys), device=keys.device)[:, None, None], selection.clamp(min=0)
    gathered_keys, gathered_values = (tensor[rows, places].flatten(0, 1)[:, None] for tensor in (keys, values))
    outputs = attend(
        queries.transpose(1, 2).flatten(0, 1)[:, :, None], gathered_keys, gathered_values, scale=scale,
        attention_mask=AttentionMask(causal=False, keys=(selection >= 0).flatten(0, 1)),
    )  # fmt: skip
    return outputs[:, :, 0].unflatten(0, places.shape[:2]).transpose(1, 2)


@dataclass(frozen=True)
class TargetAttention:
    """Attention whose distribution the indexer learns: `queries` `[B, n, N, d]` and `keys` `[B, n, L, d]` of this
    tensor rank's heads."""

    queries: Tensor
    keys: Tensor
    scale: float
    num_heads: int
    """Heads of all tensor ranks."""
    attention_mask: AttentionMask
    selection: Tensor | None
    """None: all visible tokens."""
    shard: SequenceShard
    """Sharding of the N queries over the tensor ranks, each of which scores its own."""

    @property
    def first(self) -> int:
        """Position of the first query."""
        return self.keys.shape[2] - self.queries.shape[2]

    def blocks(self) -> Iterator[slice]:
        """Blocks of queries, the same on all tensor ranks."""
        rows, heads, num_queries, _ = self.queries.shape
        return query_blocks(num_queries, rows * heads * self.keys.shape[2])

    def is_seen(self, block: slice) -> Tensor:
        """bool `[B or 1, n, L]`, True where a query of the block attends to a key."""
        if self.selection is not None:
            return selected_keys(self.selection[:, block], self.first + block.stop)
        return visible_keys(self.attention_mask, self.first, block, self.keys.device)

    def distribution(self, block: slice) -> Tensor:
        """Attention weights `[B, n, L]` of a block of queries, mean over all heads, which sum to 1. Collective."""
        wide = torch.promote_types(self.queries.dtype, torch.float32)
        keys = self.keys[:, :, : self.first + block.stop].to(wide)
        scores = (self.queries[:, :, block].to(wide) @ keys.transpose(-1, -2)) * self.scale
        weights = scores.masked_fill_(~self.is_seen(block)[:, None], float("-inf")).softmax(dim=-1).sum(dim=1)
        return self.shard.total(weights) / self.num_heads


def indexer_divergence(scores: IndexScores, target: TargetAttention) -> Tensor:
    """Scalar Σ KL(p ‖ softmax(I)) over this rank's queries, of which `scores` are, and the tokens that they attend to
    (equations 3 and 4). p is the target's distribution, which gets no gradient. Collective over the tensor ranks."""
    return _Divergence.apply(scores.queries, scores.keys, scores.head_weights, scores.first, target)


class _Divergence(torch.autograd.Function):
    """Computes the gradients in the forward pass, block by block: no scores are saved, and the backward pass has no
    collective."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, head_weights: Tensor, first: int, target: TargetAttention
    ) -> Tensor:
        scores, shard = IndexScores(queries, keys, head_weights, first), target.shard
        total = head_weights.new_zeros(())
        d_queries, d_keys, d_weights = (
            torch.zeros_like(tensor, dtype=total.dtype) for tensor in (queries, keys, head_weights)
        )
        for block in target.blocks():
            distribution, start = target.distribution(block), max(block.start, shard.first)
            own = slice(start - shard.first, min(block.stop, shard.stop) - shard.first)
            if own.start >= own.stop:
                continue
            in_block = slice(start - block.start, start - block.start + own.stop - own.start)
            seen = target.is_seen(block)[:, in_block]
            divergence, gradients = _block_divergence(scores, own, distribution[:, in_block], seen)
            total += divergence
            d_queries[:, :, own] += gradients[0]
            d_keys[:, : gradients[1].shape[1]] += gradients[1]
            d_weights[:, own] += gradients[2]
        ctx.save_for_backward(d_queries.to(queries.dtype), d_keys.to(keys.dtype), d_weights)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *((gradients[0] * saved).to(saved.dtype) for saved in ctx.saved_tensors), None, None


def _block_divergence(
    scores: IndexScores, block: slice, distribution: Tensor, seen: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """(divergence summed over a block of queries; its gradients by their queries `[B, h, n, i]`, by the keys that they
    may see `[B, L, i]`, and by their head weights `[B, n, h]`). `distribution` and `seen` `[B, n, L]` may have further,
    unseen keys."""
    activations, weights, keys = scores.activations(block), scores.weights(block), scores.visible_keys(block)
    distribution, seen = distribution[..., : keys.shape[1]], seen[..., : keys.shape[1]]
    logits = (activations * weights).sum(dim=1).masked_fill_(~seen, float("-inf"))
    log_shares = logits.log_softmax(dim=-1)
    divergence = torch.special.xlogy(distribution, distribution) - distribution * log_shares.masked_fill(~seen, 0.0)
    d_scores = (log_shares.exp() - distribution)[:, None]
    d_weights = (activations * d_scores).sum(dim=-1).transpose(1, 2)
    d_products = (d_scores * weights * keys.shape[-1] ** -0.5).masked_fill_(activations <= 0, 0.0)
    queries = scores.queries[:, :, block].to(keys.dtype)
    d_keys = torch.einsum("bhnl,bhni->bli", d_products, queries)
    return divergence.sum(), (d_products @ keys[:, None], d_keys, d_weights)
