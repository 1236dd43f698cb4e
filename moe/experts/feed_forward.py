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
    x: Tensor, weights: ExpertWeights, counts: list[int], activation: str, products: GroupedProducts
) -> Tensor:
    """`[n, M]`: act(x · w_in[e] + b_in[e]) · w_out[e] + b_out[e] for `x` `[n, M]` sorted by expert, `counts[e]` rows
    for expert e. Differentiable in x and in all weights; an expert without rows has gradients of zeros.

    What is kept for the backward pass is x and what the first matrices gave; hidden states are made again.
    """
    w = weights
    return _FeedForward.apply(
        x.contiguous(),
        w.w_in,
        w.w_out,
        w.w_gate,
        w.b_in,
        w.b_out,
        w.b_gate,
        counts,
        ACTIVATIONS[activation],
        products,
    )


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
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
        up = _biased(products.forward(x, w_in, counts), b_in, counts)
        gate = None if w_gate is None else _biased(products.forward(x, w_gate, counts), b_gate, counts)
        hidden = activation.forward(up, gate)
        ctx.save_for_backward(x, w_in, w_out, w_gate, up, gate)
        ctx.has_bias, ctx.settings = b_in is not None, (counts, activation, products)
        return _biased(products.forward(hidden, w_out, counts), b_out, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, w_in, w_out, w_gate, up, gate = ctx.saved_tensors
        counts, activation, products = ctx.settings
        d_out = gradients[0].contiguous()
        d_w_out = products.weight_gradient(activation.again(up, gate), d_out, counts)
        d_up, d_gate = activation.backward(products.input_gradient(d_out, w_out, counts), up, gate)

        d_x = products.input_gradient(d_up, w_in, counts)
        d_w_in = products.weight_gradient(x, d_up, counts)
        d_w_gate = None
        if d_gate is not None:
            d_x += products.input_gradient(d_gate, w_gate, counts)
            d_w_gate = products.weight_gradient(x, d_gate, counts)
        d_b_in, d_b_out, d_b_gate = (
            _sum_by_expert(each, counts) if ctx.has_bias and each is not None else None
            for each in (d_up, d_out, d_gate)
        )
        return d_x, d_w_in, d_w_out, d_w_gate, d_b_in, d_b_out, d_b_gate, None, None, None


def _biased(rows: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
    if bias is None:
        return rows
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(rows.device)
    return rows.add_(bias.index_select(0, expert))


def _sum_by_expert(rows: Tensor, counts: list[int]) -> Tensor:
    """`[E, width]`, summed in float32 at least, in one order always."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return torch.stack([part.sum(0) for part in wide.split(counts)]).to(rows.dtype)


def feed_forward_reference(x: Tensor, weights: ExpertWeights, counts: list[int], activation: str) -> Tensor:
    """The same, one expert after another, in plain operations: slow and obvious."""
    outputs = []
    for e, rows in enumerate(x.split(counts)):
        up = rows @ weights.w_in[e] + (0 if weights.b_in is None else weights.b_in[e])
        gate = up
        if weights.w_gate is not None:
            gate = rows @ weights.w_gate[e] + (0 if weights.b_gate is None else weights.b_gate[e])
        hidden = activated(activation, up, gate)
        outputs.append(hidden @ weights.w_out[e] + (0 if weights.b_out is None else weights.b_out[e]))
    return torch.cat(outputs)
