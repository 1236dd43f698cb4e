"""Sums over blocks of attention, forward and backward (online softmax, arXiv 1805.02867; as in FlashAttention, arXiv
2205.14135).

Shapes: B rows, n query heads, m key and value heads, N queries, K keys, d and dv head widths.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from moe.layers.block_attention import BlockKernel
from moe.layers.mask_blocks import Block


class OnlineSoftmax:
    """Outputs and log-sum-exps of queries `[B, n, N, d]` over the keys so far, in at least float32."""

    def __init__(self, queries: Tensor, value_width: int) -> None:
        rows, heads, num_queries, _ = queries.shape
        dtype = torch.promote_types(queries.dtype, torch.float32)
        # Heads beside their width, as the projection after attention reads them.
        self._outputs = queries.new_zeros(rows, num_queries, heads, value_width, dtype=dtype).transpose(1, 2)
        self._log_sums = queries.new_full((rows, heads, num_queries), float("-inf"), dtype=dtype)

    def add_blocks(
        self, kernel: BlockKernel, blocks: Iterable[Block], queries: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Add blocks of `keys` `[B, m, K, d]` and `values` `[B, m, K, dv]`, which this object has not seen yet."""
        for block in blocks:
            outputs, log_sums = kernel.attend(
                block, queries[:, :, block.queries], keys[:, :, block.keys], values[:, :, block.keys]
            )
            self._merge(block.queries, outputs, log_sums)

    def finish(self, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(outputs `[B, n, N, dv]` in `dtype`, log-sum-exps `[B, n, N]`), with a column of `sinks` `[n]`; 0 for a query
        that sees no key."""
        outputs, log_sums = self._outputs, self._log_sums
        if sinks is not None:
            with_sinks = torch.logaddexp(log_sums, sinks.to(log_sums.dtype)[:, None])
            outputs = outputs * (log_sums - with_sinks).exp_()[..., None]
            log_sums = with_sinks
        return outputs.to(dtype), log_sums.masked_fill(log_sums == float("-inf"), 0.0)

    def _merge(self, queries: slice, outputs: Tensor, log_sums: Tensor) -> None:
        sums, totals = self._log_sums[:, :, queries], self._outputs[:, :, queries]
        log_sums = log_sums.to(sums.dtype)
        # exp(z) / (exp(z) + exp(z')), and 0 where both are -inf.
        weights = (log_sums - sums).sigmoid_().masked_fill_(log_sums == float("-inf"), 0.0)
        totals.lerp_(outputs.to(totals.dtype), weights[..., None])
        torch.logaddexp(sums, log_sums, out=sums)


def sinks_gradient(sinks: Tensor, gradient: Tensor, outputs: Tensor, log_sums: Tensor) -> Tensor:
    """`[n]`: with the sink c, -exp(c - z) · rowsum(do · o) over all rows and queries."""
    shares = (sinks.to(log_sums.dtype)[:, None] - log_sums).exp_()
    dot_products = (gradient.to(log_sums.dtype) * outputs).sum(dim=-1)
    return -(shares * dot_products).sum(dim=(0, 2)).to(sinks.dtype)


class QueryGradients:
    """Gradients of queries over the blocks so far, and of the keys of some blocks."""

    def __init__(self, gradient: Tensor, outputs: Tensor, log_sums: Tensor, queries: Tensor) -> None:
        """`gradient` is that of the finished `outputs`."""
        self._final, self._queries = (gradient, outputs, log_sums), queries
        self._sums = _wide_zeros(queries)

    def add_blocks(
        self, kernel: BlockKernel, blocks: Iterable[Block], keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of `keys` `[B, m, K, d]` and `values` `[B, m, K, dv]` in at least float32."""
        d_keys, d_values = _wide_zeros(keys), _wide_zeros(values)
        for block in blocks:
            gradient, outputs, log_sums = (tensor[:, :, block.queries] for tensor in self._final)
            parts = kernel.gradients(
                block, (gradient, outputs, log_sums),
                self._queries[:, :, block.queries], keys[:, :, block.keys], values[:, :, block.keys],
            )  # fmt: skip
            for total, part, indices in zip(
                (self._sums, d_keys, d_values), parts, (block.queries, block.keys, block.keys), strict=True
            ):
                total[:, :, indices] += part
        return d_keys, d_values

    def finish(self) -> Tensor:
        """`[B, n, N, d]`, in the dtype of the queries."""
        return self._sums.to(self._queries.dtype)


def _wide_zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
