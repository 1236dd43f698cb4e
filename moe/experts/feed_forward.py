"""Experts over rows sorted by expert: two matrices and an activation, or three where the activation has a gate."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.experts.activation import Activation
from moe.experts.products import GroupedProducts
from moe.experts.weights import ExpertWeights, WeightGradients
from moe.parallel import Room
from moe.parallel.accelerator import accelerator


@dataclass(frozen=True)
class Work:
    """Arithmetic of one call: how rows sorted by expert are multiplied."""

    counts: list[int]
    """Rows of each expert."""
    activation: Activation
    products: GroupedProducts
    recompute: bool = False
    """Keep nothing of the first matrices' products for the backward pass, and multiply again there."""


Kept = tuple[Tensor | None, Tensor | None]
"""Products of the first matrices, `up` and `gate`; None where it is recomputed, or there is none."""


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
    d_out: Tensor,
    x: Tensor,
    scale: Tensor,
    w: ExpertWeights,
    kept: Kept,
    work: Work,
    found: WeightGradients,
) -> tuple[Tensor, Tensor]:
    """(gradients of x, of scale); those of the weights go to `found`: zeros for an expert without rows.

    Hidden states are made again, and the scale's gradient comes from them, so that outputs need not be kept. The order
    is that in which the least is there at a time.
    """
    counts, products, column = work.counts, work.products, scale.to(x.dtype)[:, None]
    up, gate = kept
    if up is None:
        up, gate = _first_products(x, w, work)
    hidden, activated = work.activation.recompute(up, gate)
    d_hidden = products.input_gradient(d_out, w.w_out, counts)  # of hidden states times scale
    d_scale = _dot_by_row(d_hidden, hidden, scale.dtype)
    if hidden.shape[1] < x.shape[1]:
        hidden = _scaled(hidden, column, up)
        _multiply(hidden, d_out, work, found.w_out)
    else:
        _multiply(hidden, d_out * column, work, found.w_out)
    del hidden
    d_up, d_gate = work.activation.backward(d_hidden.mul_(column), up, gate, activated)
    del activated, d_hidden

    d_x = products.input_gradient(d_up, w.w_in, counts)
    if d_gate is not None:
        assert w.w_gate is not None
        d_x = products.input_gradient(d_gate, w.w_gate, counts, onto=d_x)
    if w.b_out is not None:
        d_biased = d_out[:, w.biased]
        d_scale += _dot_by_row(d_biased, _by_row(w.b_out, counts), scale.dtype)
        _sum_by_expert(d_up, work, found.b_in)
        _sum_by_expert(d_biased * column, work, found.b_out)
        if d_gate is not None:
            _sum_by_expert(d_gate, work, found.b_gate)
    _multiply(x, d_up, work, found.w_in)
    del d_up
    if d_gate is not None:
        _multiply(x, d_gate, work, found.w_gate)
    return d_x, d_scale


def _multiply(x: Tensor, d_y: Tensor, work: Work, room: Room | None) -> None:
    assert room is not None
    room.note(work.products.weight_gradient(x, d_y, work.counts, room.into, adds=room.adds))


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
    up, gate = _multiplied(x, w, work)
    if w.b_in is not None:
        up += _by_row(w.b_in, work.counts)
    if gate is not None and w.b_gate is not None:
        gate += _by_row(w.b_gate, work.counts)
    return work.activation.leave(up), gate


def _multiplied(x: Tensor, w: ExpertWeights, work: Work) -> tuple[Tensor, Tensor | None]:
    both = w.w_in_and_gate
    if both is not None:
        up, gate = work.products.forward(x, both, work.counts).chunk(2, dim=1)
        return up, gate
    up = work.products.forward(x, w.w_in, work.counts)
    return up, None if w.w_gate is None else work.products.forward(x, w.w_gate, work.counts)


def feed_forward(x: Tensor, scale: Tensor, weights: ExpertWeights, work: Work) -> Tensor:
    """`forward_pass`, differentiable in x, scale and all weights, which may be wider than the rows."""
    return _FeedForward.apply(x.contiguous(), scale, work, weights.b_out_first, *weights.tensors)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, work: Work, b_out_first: int, *tensors: Tensor | None
    ) -> Tensor:
        weights = ExpertWeights.of(tensors, b_out_first).narrow(x.dtype)
        out, kept = forward_pass(x, scale, weights, work)
        ctx.save_for_backward(x, scale, *kept, *weights.tensors)
        ctx.settings, ctx.parameters = (work, b_out_first), tensors
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, up, gate, *tensors = ctx.saved_tensors
        work, b_out_first = ctx.settings
        weights = ExpertWeights.of(tensors, b_out_first)
        found = WeightGradients(ctx.parameters)
        d_x, d_scale = backward_pass(gradients[0].contiguous(), x, scale, weights, (up, gate), work, found)
        return d_x, d_scale, None, None, *found.give()


def _by_row(bias: Tensor, counts: list[int]) -> Tensor:
    """`[n, width]`: the bias `[E, width]` of each row's expert."""
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return bias.index_select(0, accelerator(bias.device).take(expert))


def _sum_by_expert(rows: Tensor, work: Work, room: Room | None) -> None:
    """`[E, width]`, summed in float32 at least, in one order always."""
    assert room is not None
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    room.write(torch.stack([part.sum(0) for part in wide.split(work.counts)]))


def feed_forward_reference(
    x: Tensor, scale: Tensor, weights: ExpertWeights, counts: list[int], activation: Activation
) -> Tensor:
    """The same, one expert after another, in plain operations: slow and obvious."""
    outputs = []
    for e, rows in enumerate(x.split(counts)):
        up = rows @ weights.w_in[e] + (0 if weights.b_in is None else weights.b_in[e])
        gate = up
        if weights.w_gate is not None:
            gate = rows @ weights.w_gate[e] + (0 if weights.b_gate is None else weights.b_gate[e])
        hidden = activation.plain(up, gate)
        out = hidden @ weights.w_out[e]
        outputs.append(out if weights.b_out is None else out + weights.b_out[e])
    return torch.cat(outputs) * scale.to(x.dtype)[:, None]
