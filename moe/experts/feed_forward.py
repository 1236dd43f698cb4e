"""Two-matrix ReLU experts over rows sorted by expert: out = relu(x · w_in[e]) · w_out[e].

One product an expert, written straight into place, forward and backward. (Left to autograd, a loop that
indexes `w[e]` builds a full-size zero gradient for each expert.)
"""

from typing import Any

import torch
from torch import Tensor


class _GroupedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_in: Tensor, w_out: Tensor, counts: list[int]) -> Tensor:
        hidden = x.new_empty(x.shape[0], w_in.shape[2])
        out = x.new_empty(x.shape[0], w_out.shape[2])
        for expert, rows in _segments(counts):
            torch.mm(x[rows], w_in[expert], out=hidden[rows])
            hidden[rows].relu_()
            torch.mm(hidden[rows], w_out[expert], out=out[rows])
        ctx.save_for_backward(x, w_in, w_out, hidden)
        ctx.counts = counts
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, w_in, w_out, hidden = ctx.saved_tensors
        d_out = gradients[0].contiguous()
        d_x, d_hidden = torch.empty_like(x), torch.empty_like(hidden)
        d_w_in, d_w_out = torch.empty_like(w_in), torch.empty_like(w_out)
        for expert, count in enumerate(ctx.counts):
            if not count:  # an expert without tokens has a gradient of zeros, not none
                d_w_in[expert].zero_()
                d_w_out[expert].zero_()
        for expert, rows in _segments(ctx.counts):
            torch.mm(hidden[rows].t(), d_out[rows], out=d_w_out[expert])
            torch.mm(d_out[rows], w_out[expert].t(), out=d_hidden[rows])
            d_hidden[rows] *= hidden[rows] > 0
            torch.mm(x[rows].t(), d_hidden[rows], out=d_w_in[expert])
            torch.mm(d_hidden[rows], w_in[expert].t(), out=d_x[rows])
        return d_x, d_w_in, d_w_out, None


def _segments(counts: list[int]) -> list[tuple[int, slice]]:
    segments, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            segments.append((expert, slice(start, start + count)))
        start += count
    return segments


def grouped_feed_forward(x: Tensor, w_in: Tensor, w_out: Tensor, counts: list[int]) -> Tensor:
    """`[n, M]` through the experts: `x` `[n, M]` sorted by expert, `counts[e]` rows for expert e.

    `w_in` `[E, M, H]` and `w_out` `[E, H, M]` in the dtype of `x`. Differentiable in all three.
    """
    return _GroupedFeedForward.apply(x.contiguous(), w_in, w_out, counts)


def feed_forward_reference(x: Tensor, w_in: Tensor, w_out: Tensor, counts: list[int]) -> Tensor:
    """The same, one expert after another, in plain operations: slow and obvious."""
    rows = x.split(counts)
    return torch.cat([row.matmul(w_in[e]).relu().matmul(w_out[e]) for e, row in enumerate(rows)])
