"""Experts over rows sorted by expert: two matrices and an activation, or three where the activation has a gate."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.experts.activation import ACTIVATIONS, Activation
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
    """`[E, M]`"""
    b_gate: Tensor | None = None
    """`[E, H]`"""


def feed_forward(
    x: Tensor,
    scale: Tensor,
    weights: ExpertWeights,
    counts: list[int],
    activation: str,
    products: GroupedProducts,
) -> Tensor:
    """`[n, M]`: scale · (act(x · w_in[e] + b_in[e]) · w_out[e] + b_out[e]) for `x` `[n, M]` sorted by expert,
    `counts[e]` rows for expert e, and `scale` `[n]`.

    Differentiable in x, scale and all weights; an expert without rows has gradients of zeros. What is kept for the
    backward pass is x and what the first matrices gave: hidden states are made again, and the scale's gradient comes
    from them, so that outputs need not be kept. The scale is applied where rows are narrower, before or after w_out.
    """
    w = weights
    return _FeedForward.apply(
        x.contiguous(), scale, w.w_in, w.w_out, w.w_gate, w.b_in, w.b_out, w.b_gate,
        counts, ACTIVATIONS[activation], products,
    )  # fmt: skip


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        w_gate: Tensor | None,
        b_in: Tensor | None,
        b_out: Tensor | None,
        b_gate: Tensor | None,
        counts: list[int],
        activation: Activation,
        products: GroupedProducts,
    ) -> Tensor:
        up = products.forward(x, w_in, counts)
        gate = None if w_gate is None else products.forward(x, w_gate, counts)
        if b_in is not None:
            up += _by_row(b_in, counts)
        if gate is not None and b_gate is not None:
            gate += _by_row(b_gate, counts)
        column = scale.to(x.dtype)[:, None]
        hidden = activation.forward(up, gate)
        narrow_hidden = hidden.shape[1] < x.shape[1]
        out = products.forward(hidden * column if narrow_hidden else hidden, w_out, counts)
        if not narrow_hidden:
            out *= column
        if b_out is not None:
            out += _by_row(b_out, counts) * column
        ctx.save_for_backward(x, scale, w_in, w_out, w_gate, b_out, up, gate)
        ctx.settings = counts, activation, products
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, w_in, w_out, w_gate, b_out, up, gate = ctx.saved_tensors
        counts, activation, products = ctx.settings
        d_out, column = gradients[0].contiguous(), scale.to(x.dtype)[:, None]

        hidden = activation.again(up, gate)
        d_hidden = products.input_gradient(d_out, w_out, counts)  # of hidden states times scale
        d_scale = torch.linalg.vecdot(d_hidden.to(scale.dtype), hidden.to(scale.dtype))
        if hidden.shape[1] < x.shape[1]:
            d_w_out = products.weight_gradient(hidden * column, d_out, counts)
        else:
            d_w_out = products.weight_gradient(hidden, d_out * column, counts)
        d_up, d_gate = activation.backward(d_hidden.mul_(column), up, gate)

        d_w_in = products.weight_gradient(x, d_up, counts)
        d_x = products.input_gradient(d_up, w_in, counts)
        d_w_gate = d_b_in = d_b_out = d_b_gate = None
        if d_gate is not None:
            d_w_gate = products.weight_gradient(x, d_gate, counts)
            d_x = products.input_gradient(d_gate, w_gate, counts, onto=d_x)
        if b_out is not None:
            d_scale += torch.linalg.vecdot(d_out.to(scale.dtype), _by_row(b_out, counts).to(scale.dtype))
            d_b_in, d_b_out = _sum_by_expert(d_up, counts), _sum_by_expert(d_out * column, counts)
            d_b_gate = None if d_gate is None else _sum_by_expert(d_gate, counts)
        return d_x, d_scale, d_w_in, d_w_out, d_w_gate, d_b_in, d_b_out, d_b_gate, None, None, None


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
        outputs.append(hidden @ weights.w_out[e] + (0 if weights.b_out is None else weights.b_out[e]))
    return torch.cat(outputs) * scale.to(x.dtype)[:, None]
