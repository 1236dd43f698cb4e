"""Experts over rows sorted by expert: two matrices and an activation, or three where the activation has a gate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.experts.activation import Activation
from moe.experts.products import GroupedProducts
from moe.experts.shared import activated


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of E experts, each `[E, ...]`, in the dtype of the rows; None for what these experts do not have."""

    w_in: Tensor
    """`[E, M, H]`"""
    w_out: Tensor
    """`[E, H, M]`"""
    w_gate: Tensor | None = None
    """`[E, M, H]`"""
    b_in: Tensor | None = None
    """`[E, H]`"""
    b_out: Tensor | None = None
    """`[E, M]`, or some of its columns, from `b_out_first` on"""
    b_gate: Tensor | None = None
    """`[E, H]`"""
    b_out_first: int = 0
    """The column of the output that `b_out` begins at, where each rank holds some of its entries."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], b_out_first: int = 0) -> "ExpertWeights":
        """From `tensors`, as autograd functions take and give them."""
        w_in, w_out, w_gate, b_in, b_out, b_gate = tensors
        assert w_in is not None
        assert w_out is not None
        return cls(w_in, w_out, w_gate, b_in, b_out, b_gate, b_out_first)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.w_in, self.w_out, self.w_gate, self.b_in, self.b_out, self.b_gate

    @property
    def biased(self) -> slice:
        """The columns that `b_out` is added to."""
        assert self.b_out is not None
        return slice(self.b_out_first, self.b_out_first + self.b_out.shape[1])


@dataclass(frozen=True)
class Work:
    """How rows sorted by expert are multiplied."""

    counts: list[int]
    """Rows of each expert."""
    activation: Activation
    products: GroupedProducts
    recompute: bool = False
    """Keep nothing of the first matrices' products for the backward pass, and multiply again there."""


Kept = tuple[Tensor | None, Tensor | None]
"""What the first matrices gave, `up` and `gate`; None where it is made again, or there is none."""


def forward_pass(x: Tensor, scale: Tensor, w: ExpertWeights, work: Work) -> tuple[Tensor, Kept]:
    """(`[n, M]`: scale · (act(x · w_in[e] + b_in[e]) · w_out[e] + b_out[e]), what `backward_pass` wants to have).

    `x` `[n, M]` sorted by expert, `scale` `[n]`, which is applied where rows are narrower, before or after w_out.
    """
    up, gate = _first_products(x, w, work)
    column = scale.to(x.dtype)[:, None]
    hidden = work.activation.forward(up, gate)
    narrow_hidden = hidden.shape[1] < x.shape[1]
    if narrow_hidden:
        hidden = _scaled(hidden, column, up)
    out = work.products.forward(hidden, w.w_out, work.counts)
    if not narrow_hidden:
        out *= column
    if w.b_out is not None:
        out[:, w.biased] += _by_row(w.b_out, work.counts) * column
    return out, (None, None) if work.recompute else (up, gate)


def backward_pass(
    d_out: Tensor, x: Tensor, scale: Tensor, w: ExpertWeights, kept: Kept, work: Work
) -> tuple[Tensor, Tensor, "ExpertWeights"]:
    """(gradients of x, of scale, of the weights): zeros for an expert without rows.

    Hidden states are made again, and the scale's gradient comes from them, so that outputs need not be kept. The order
    is that in which the least is there at a time.
    """
    counts, products, column = work.counts, work.products, scale.to(x.dtype)[:, None]
    up, gate = kept
    if up is None:
        up, gate = _first_products(x, w, work)
    hidden, activated = work.activation.again(up, gate)
    d_hidden = products.input_gradient(d_out, w.w_out, counts)  # of hidden states times scale
    d_scale = _dot_by_row(d_hidden, hidden, scale.dtype)
    if hidden.shape[1] < x.shape[1]:
        hidden = _scaled(hidden, column, up)
        d_w_out = products.weight_gradient(hidden, d_out, counts)
    else:
        d_w_out = products.weight_gradient(hidden, d_out * column, counts)
    del hidden
    d_up, d_gate = work.activation.backward(d_hidden.mul_(column), up, gate, activated)
    del activated, d_hidden

    d_x = products.input_gradient(d_up, w.w_in, counts)
    d_w_gate = d_b_in = d_b_out = d_b_gate = None
    if d_gate is not None:
        assert w.w_gate is not None
        d_x = products.input_gradient(d_gate, w.w_gate, counts, onto=d_x)
    if w.b_out is not None:
        d_biased = d_out[:, w.biased]
        d_scale += _dot_by_row(d_biased, _by_row(w.b_out, counts), scale.dtype)
        d_b_in, d_b_out = _sum_by_expert(d_up, counts), _sum_by_expert(d_biased * column, counts)
        d_b_gate = None if d_gate is None else _sum_by_expert(d_gate, counts)
    d_w_in = products.weight_gradient(x, d_up, counts)
    del d_up
    if d_gate is not None:
        d_w_gate = products.weight_gradient(x, d_gate, counts)
    return d_x, d_scale, ExpertWeights(d_w_in, d_w_out, d_w_gate, d_b_in, d_b_out, d_b_gate)


def _scaled(hidden: Tensor, column: Tensor, up: Tensor) -> Tensor:
    """`hidden` · `column`, in place unless hidden states are what is kept of `up`."""
    return hidden * column if hidden is up else hidden.mul_(column)


_BLOCKS = 16


def _dot_by_row(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`[n]`: the products of the rows of `a` and `b` `[n, H]`, multiplied and added in `dtype`, in a few blocks where
    they have to be widened for that."""
    if a.dtype == dtype:
        return torch.linalg.vecdot(a, b)
    size = max(1, -(-a.shape[0] // _BLOCKS))
    blocks = zip(a.split(size), b.split(size), strict=True)
    return torch.cat([torch.linalg.vecdot(some.to(dtype), others.to(dtype)) for some, others in blocks])


def _first_products(x: Tensor, w: ExpertWeights, work: Work) -> tuple[Tensor, Tensor | None]:
    up = work.products.forward(x, w.w_in, work.counts)
    gate = None if w.w_gate is None else work.products.forward(x, w.w_gate, work.counts)
    if w.b_in is not None:
        up += _by_row(w.b_in, work.counts)
    if gate is not None and w.b_gate is not None:
        gate += _by_row(w.b_gate, work.counts)
    return work.activation.leave(up), gate


def feed_forward(x: Tensor, scale: Tensor, weights: ExpertWeights, work: Work) -> Tensor:
    """`forward_pass`, differentiable in x, scale and all weights."""
    return _FeedForward.apply(x.contiguous(), scale, work, weights.b_out_first, *weights.tensors)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, work: Work, b_out_first: int, *tensors: Tensor | None
    ) -> Tensor:
        out, kept = forward_pass(x, scale, ExpertWeights.of(tensors, b_out_first), work)
        ctx.save_for_backward(x, scale, *kept, *tensors)
        ctx.settings = work, b_out_first
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, up, gate, *tensors = ctx.saved_tensors
        work, b_out_first = ctx.settings
        weights = ExpertWeights.of(tensors, b_out_first)
        d_x, d_scale, d_weights = backward_pass(
            gradients[0].contiguous(), x, scale, weights, (up, gate), work
        )
        return d_x, d_scale, None, None, *d_weights.tensors


def _by_row(bias: Tensor, counts: list[int]) -> Tensor:
    """`[n, width]`: the bias `[E, width]` of each row's expert."""
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return bias.index_select(0, expert.to(bias.device))


def _sum_by_expert(rows: Tensor, counts: list[int]) -> Tensor:
    """`[E, width]`, summed in float32 at least, in one order always."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return torch.stack([part.sum(0) for part in wide.split(counts)]).to(rows.dtype)


def feed_forward_reference(
    x: Tensor, scale: Tensor, weights: ExpertWeights, counts: list[int], activation: str
) -> Tensor:
    """The same, one expert after another, in plain operations: slow and obvious."""
    outputs = []
    for e, rows in enumerate(x.split(counts)):
        up = rows @ weights.w_in[e] + (0 if weights.b_in is None else weights.b_in[e])
        gate = up
        if weights.w_gate is not None:
            gate = rows @ weights.w_gate[e] + (0 if weights.b_gate is None else weights.b_gate[e])
        hidden = activated(activation, up, gate)
        out = hidden @ weights.w_out[e]
        outputs.append(out if weights.b_out is None else out + weights.b_out[e])
    return torch.cat(outputs) * scale.to(x.dtype)[:, None]
