"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), also to tokens that an indexer chooses."""

from functools import partial

import torch
from torch import Tensor, nn

from moe.layers.cache import KVCache
from moe.layers.context_attention import attend_over_context, attend_to_rows, join_runs, query_runs
from moe.layers.indexer import Indexer, query_shard
from moe.layers.linear import Linear
from moe.layers.norm import RMSNorm
from moe.layers.sequence import PassRows
from moe.layers.sparse_attention import (
    IndexScores,
    TargetAttention,
    attend_in_blocks,
    attend_to_gathered,
    attend_to_selected,
)
from moe.spec.language import LatentAttentionSpec

_LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Multi-head latent attention of one layer. Each tensor-parallel rank computes the latents of its own tokens, and
    has some of the heads."""

    def __init__(
        self, spec: LatentAttentionSpec, *, norm_one_plus: bool, layer: int = 0, selecting_layer: int | None = None
    ) -> None:
        """`selecting_layer`: the layer whose indexer chooses this one's tokens, if any."""
        super().__init__()
        self.spec, self.selecting_layer = spec, selecting_layer
        self.indexer: Indexer | None = None
        if spec.indexer is not None and layer == selecting_layer:
            self.indexer = Indexer(spec.indexer)
        dims = spec.dims(0, None)
        self._dims = dims.sharing_selection() if self.indexer is None else dims
        self.query: Linear | None = None
        self.query_down: Linear | None = None
        self.query_norm: RMSNorm | None = None
        self.query_up: Linear | None = None
        if spec.query_rank is None:
            self.query = Linear()
        else:
            self.query_down, self.query_up = Linear(), Linear()
            self.query_norm = RMSNorm(_LATENT_EPS, one_plus=norm_one_plus)
        self.key_value_down, self.key_value_up, self.output = Linear(), Linear(), Linear()
        self.key_value_norm = RMSNorm(_LATENT_EPS, one_plus=norm_one_plus)

    def forward(self, x: Tensor, rows: PassRows, cache: KVCache | None = None) -> Tensor:
        """Return `[t, M]` for this rank's share `x` `[t, M]` of the rows. With `cache`, their latents are appended to
        it, and queries attend to all cached positions."""
        spec, shard = self.spec, rows.shard
        queries, query_latents = self._queries(x, rows)
        down = self.key_value_down(x, rows.shard_dropout_key)
        latents, rotary_keys = down.split([spec.key_value_rank, spec.rope_dim], dim=-1)
        latents = shard.gather_rows(self.key_value_norm(latents))
        rotary_keys = shard.gather_rows(rotary_keys)[:, None]
        rotary_keys = rows.rotate(rotary_keys, spec.rope.pairing)[:, 0]
        is_first_pass = cache is None or cache.is_empty
        keys: tuple[Tensor, ...] = (latents, rotary_keys)
        if self.indexer is not None and (cache is not None or self.indexer.is_used(rows)):
            keys += (self.indexer.keys(x, rows),)
        if cache is not None:
            keys = cache.append(*keys)
        elif self._gathers_positions(rows):
            keys = rows.gather_positions(*keys)
        latents, rotary_keys = keys[:2]
        scores = None
        if self.indexer is not None and self.indexer.is_used(rows):
            assert query_latents is not None
            scores = self.indexer.scores(x, query_latents, keys[2], rows)
        selection = self._selection(scores, rows, queries.shape[2], latents.shape[1])
        if is_first_pass and not self._gathers(rows):
            outputs = self._attend_to_heads(queries, latents, rotary_keys, rows, scores, selection)
        else:
            outputs = self._attend_to_latents(queries, latents, rotary_keys, rows, selection)
        outputs = outputs.transpose(1, 2).flatten(2)
        return self.output.add_bias(shard.scatter_rows(self.output.product(outputs, rows.dropout_key)))

    def new_cache(self, num_rows: int, num_positions: int, like: Tensor) -> KVCache:
        """Empty latent cache for `num_rows` rows of `num_positions`, on the device and in the dtype of `like`."""
        widths = [self.spec.key_value_rank, self.spec.rope_dim]
        widths += [] if self.indexer is None else [self.indexer.spec.head_dim]
        return KVCache.empty(num_positions, None, like, *(((num_rows,), width) for width in widths))

    def _selection(
        self, scores: list[IndexScores] | None, rows: PassRows, num_queries: int, num_keys: int
    ) -> Tensor | None:
        """Selection `[B, N, K]` of the tokens that queries attend to; None: all that they see."""
        if self.selecting_layer is None or self.spec.indexer is None:
            return None
        if self.indexer is None:
            return rows.selections[self.selecting_layer]
        selection = None if scores is None else self.indexer(scores, rows, num_queries, num_keys)
        if self.spec.indexer.shared_layers:
            rows.selections[self.selecting_layer] = selection
        return selection

    def _queries(self, x: Tensor, rows: PassRows) -> tuple[Tensor, Tensor | None]:
        """(queries `[B, heads, N, head_dim + rope_dim]`, the last part rotated, scaled by position; their latents
        `[B, N, rank]`, if any)."""
        spec, latents = self.spec, None
        if self.query is not None:
            queries = self.query(rows.shard.gather_rows(x), rows.dropout_key)
        else:
            assert self.query_down is not None
            assert self.query_norm is not None
            assert self.query_up is not None
            down = self.query_norm(self.query_down(x, rows.shard_dropout_key))
            latents = rows.shard.gather_rows(down)
            queries = self.query_up(latents, rows.dropout_key)
        queries = queries.unflatten(-1, (-1, spec.head_dim + spec.rope_dim)).transpose(1, 2)
        plain, rotary = queries.split([spec.head_dim, spec.rope_dim], dim=-1)
        rotary = rows.rotate(rotary, spec.rope.pairing)
        queries = torch.cat((plain, rotary), dim=-1)
        return rows.scale_queries(queries, spec.query_scaling), latents

    def _attend_to_heads(
        self,
        queries: Tensor,
        latents: Tensor,
        rotary_keys: Tensor,
        rows: PassRows,
        scores: list[IndexScores] | None,
        selection: Tensor | None,
    ) -> Tensor:
        """`[B, heads, N, value_dim]`, with keys and values of each head: fewest operations for as many queries as
        keys."""
        spec, mask, is_gathered = self.spec, rows.attention_mask, self._gathers_positions(rows)
        up = self.key_value_up(latents, rows.row_dropout_key if is_gathered else rows.dropout_key)
        up = up.unflatten(-1, (-1, spec.head_dim + spec.value_dim)).transpose(1, 2)
        keys, values = up.split([spec.head_dim, spec.value_dim], dim=-1)
        shared_keys = rotary_keys[:, None].expand(-1, keys.shape[1], -1, -1)
        keys = torch.cat((keys, shared_keys), dim=-1)
        runs = query_runs(rows.context, queries.shape[2], keys.shape[2])
        if selection is None:
            outputs = (attend_to_rows if is_gathered else attend_over_context)(
                queries, keys, values, context=rows.context, scale=spec.score_scale, attention_mask=mask
            )
        else:
            outputs = join_runs([
                attend_to_selected(
                    queries[:, :, run], keys[:, :, :stop], values[:, :, :stop], selection[:, run],
                    scale=spec.score_scale,
                )
                for run, stop in runs
            ])  # fmt: skip
        if self.indexer is None or scores is None or not self.indexer.has_loss(rows):
            return outputs
        targets = [
            TargetAttention(
                queries[:, :, run].detach(), keys[:, :, :stop].detach(), spec.score_scale, spec.num_heads, mask,
                None if selection is None else selection[:, run], query_shard(rows, run.stop - run.start),
            )
            for run, stop in runs
        ]  # fmt: skip
        return self.indexer.add_loss(outputs, scores, targets, rows)

    def _attend_to_latents(
        self, queries: Tensor, latents: Tensor, rotary_keys: Tensor, rows: PassRows, selection: Tensor | None
    ) -> Tensor:
        """Attention with the key and value projections absorbed into the query side (section 2.1.2): all heads attend
        to the latents directly, which is cheaper for few queries."""
        spec = self.spec
        up = self.key_value_up.merged_weight(queries.dtype)
        up = up.unflatten(0, (-1, spec.head_dim + spec.value_dim))
        up_keys, up_values = up.split([spec.head_dim, spec.value_dim], dim=1)  # [heads, width, rank]
        keys = torch.cat((latents, rotary_keys), dim=-1)
        if selection is not None:
            row_elements = len(keys) * selection.shape[-1] * (keys.shape[-1] + latents.shape[-1])
            attend_in_block = partial(_attend_to_gathered_latents, spec)
            shared = keys, latents, up_keys, up_values
            return attend_in_blocks(attend_in_block, queries, selection, *shared, row_elements=row_elements)
        latent_outputs = attend_to_rows(
            _absorb(queries, up_keys), keys[:, None], latents[:, None], context=rows.context, scale=spec.score_scale,
            attention_mask=rows.attention_mask,
        )  # fmt: skip
        return torch.matmul(latent_outputs, up_values.transpose(1, 2))

    def _gathers_positions(self, rows: PassRows) -> bool:
        """Whether context ranks gather latents, which are much narrower than the keys and values of all heads that each
        rank computes from them. They do not if keys and values of heads are exchanged, other than for an indexer."""
        return self.spec.indexer is not None or rows.context is None or rows.context.exchange == "gather"

    def _gathers(self, rows: PassRows) -> bool:
        """Whether a pass without cached positions gathers the selected latents. They pass no adapter's dropout."""
        return self._dims.gathers(rows.num_positions) and self.key_value_up.dropout_masks(rows.dropout_key) is None


def _absorb(queries: Tensor, up_keys: Tensor) -> Tensor:
    """Queries of latents and rotary keys, `[B, heads, N, rank + rope_dim]`."""
    plain, rotary = queries.split([up_keys.shape[1], queries.shape[-1] - up_keys.shape[1]], dim=-1)
    return torch.cat((torch.matmul(plain, up_keys), rotary), dim=-1)


def _attend_to_gathered_latents(
    spec: LatentAttentionSpec,
    _block: slice,
    queries: Tensor,
    selection: Tensor,
    keys: Tensor,
    latents: Tensor,
    up_keys: Tensor,
    up_values: Tensor,
) -> Tensor:
    latent_outputs = attend_to_gathered(_absorb(queries, up_keys), keys, latents, selection, scale=spec.score_scale)
    return torch.matmul(latent_outputs, up_values.transpose(1, 2))
