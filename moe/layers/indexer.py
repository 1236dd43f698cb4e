"""Lightning indexer of DeepSeek sparse attention (DSA, arXiv 2512.02556, section 2.1)."""

import torch
from torch import Tensor, nn

from moe.layers.context_attention import join_runs, query_runs
from moe.layers.linear import Linear, wide_linear
from moe.layers.norm import LayerNorm
from moe.layers.rotary import rotate
from moe.layers.sequence import PassRows
from moe.layers.sparse_attention import IndexScores, TargetAttention, indexer_divergence, select_tokens
from moe.parallel import SequenceShard
from moe.routing.balance import WithLoss
from moe.spec.language import IndexerSpec

_KEY_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """Lightning indexer of one layer. Each tensor-parallel rank scores a share of each row's queries."""

    last_divergence: Tensor | None = None
    """Scalar: this rank's divergence in the last forward pass with a loss, for the record."""

    def __init__(self, spec: IndexerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.query, self.key, self.head_weights = Linear(), Linear(), Linear()
        self.key_norm = LayerNorm(_KEY_NORM_EPS)

    def keys(self, x: Tensor, rows: PassRows) -> Tensor:
        """Keys `[B, N, i]` of this context rank's positions, of which `x` `[t, M]` is this rank's share. Nothing learns
        from them but the indexer."""
        keys = rows.shard.gather_rows(self.key_norm(self.key(x.detach())))[:, None]
        return rows.rotate(keys, self.spec.pairing)[:, 0]

    def scores(self, x: Tensor, query_latents: Tensor, keys: Tensor, rows: PassRows) -> list[IndexScores]:
        """Scores of this rank's queries for all `keys` `[B, L, i]`, by run of the context rank's positions.
        `query_latents` `[B, N, rank]` are those of the context rank."""
        weight = self.head_weights.weight.to(torch.promote_types(x.dtype, torch.float32))
        weights = rows.shard.gather_rows(wide_linear(x.detach(), weight, None) * self.spec.num_heads**-0.5)
        return [
            self._run_scores(query_latents, weights, keys[:, :stop], rows, run)
            for run, stop in query_runs(rows.context, query_latents.shape[1], keys.shape[1])
        ]

    def _run_scores(
        self, query_latents: Tensor, weights: Tensor, keys: Tensor, rows: PassRows, run: slice
    ) -> IndexScores:
        """Scores of this rank's part of a run of queries, the last of the positions of `keys`."""
        num_queries = run.stop - run.start
        shard = query_shard(rows, num_queries)
        own = slice(run.start + shard.first, run.start + shard.stop)
        queries = self.query(query_latents[:, own].detach()).unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2)
        if rows.rotary is not None:
            cos, sin = (table[:, :, own] for table in rows.rotary)
            queries = rotate(queries, cos, sin, self.spec.pairing)
        return IndexScores(queries, keys, weights[:, own], keys.shape[1] - num_queries + shard.first)

    def forward(self, scores: list[IndexScores], rows: PassRows, num_queries: int, num_keys: int) -> Tensor | None:
        """Selection `[B, N, K]` of the tokens that the rows' queries attend to; None: all that they see."""
        if not self._selects(rows):
            return None
        selections = []
        for run_scores, (run, _) in zip(scores, query_runs(rows.context, num_queries, num_keys), strict=True):
            own = select_tokens(run_scores, self.spec.top_k, rows.attention_mask)
            shard = query_shard(rows, run.stop - run.start)
            selections.append(shard.gather_results(own.transpose(0, 1)).transpose(0, 1))
        return join_runs(selections, dim=1)

    def is_used(self, rows: PassRows) -> bool:
        """Whether this pass needs scores: rows have more tokens than are selected, or the indexer learns."""
        return self._selects(rows) or self.has_loss(rows)

    def _selects(self, rows: PassRows) -> bool:
        return rows.num_positions > self.spec.top_k and self.spec.stage == "sparse"

    def has_loss(self, rows: PassRows) -> bool:
        """Whether the indexer learns in this pass."""
        return self.spec.loss_coefficient > 0 and rows.batch_tokens is not None and torch.is_grad_enabled()

    def add_loss(
        self, outputs: Tensor, scores: list[IndexScores], targets: list[TargetAttention], rows: PassRows
    ) -> Tensor:
        """Return `outputs` unchanged; backpropagating through them includes this rank's share of the indexer's loss.
        `scores` and `targets` by run."""
        assert rows.batch_tokens is not None
        divergences = [indexer_divergence(*pair) for pair in zip(scores, targets, strict=True)]
        divergence = torch.stack(divergences).sum()
        self.last_divergence = divergence.detach()
        loss = self.spec.loss_coefficient * divergence / rows.batch_tokens
        return WithLoss.apply(outputs, loss, None) if loss.requires_grad else outputs


def query_shard(rows: PassRows, num_queries: int) -> SequenceShard:
    """Sharding of each row's queries, or of a run of them, over the tensor ranks, for the indexer."""
    return SequenceShard(num_queries, rows.shard.group, rows.shard.label)
