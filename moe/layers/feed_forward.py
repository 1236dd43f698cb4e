"""Dense feed-forward layer."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from moe.experts import Activation, build_activation
from moe.layers.adapter_dropout import DropoutKey, DropoutMasks
from moe.layers.linear import Linear, add_product, matrix_operand, product
from moe.parallel import Layout, QuantizedWeight, SequenceShard, cast_parameter, narrow, weight_gradient


class FeedForward(nn.Module):
    """Dense feed-forward layer: two matrices and an activation, or three if it is gated (arXiv 2002.05202). If split
    over tensor-parallel ranks, each rank has some of the hidden units and processes all tokens."""

    recompute = False
    """Recompute the hidden states in the backward pass."""

    def __init__(self, activation: str = "relu") -> None:
        super().__init__()
        self.activation = build_activation(activation)
        self.w_in, self.w_out = Linear(), Linear()
        self.w_gate = Linear() if self.activation.is_gated else None

    def set_layout(self, layout: Layout) -> None:
        self.recompute = layout.recompute == "selective"

    def forward(self, x: Tensor, shard: SequenceShard, dropout_key: DropoutKey | None = None) -> Tensor:
        """Return `[t, M]` for `x` `[t, M]`, this rank's share of the tokens; `dropout_key` covers all of them."""
        x = shard.gather(x)
        if self.recompute and torch.is_grad_enabled():
            return shard.scatter(
                checkpoint(self._feed_forward, x, dropout_key, use_reentrant=False, preserve_rng_state=False)
            )
        return shard.scatter(self._feed_forward(x, dropout_key))

    def _feed_forward(self, x: Tensor, dropout_key: DropoutKey | None) -> Tensor:
        if self.activation.name == "relu":  # autograd saves hidden states once; the gradient needs nothing else
            return self.w_out(self.w_in(x, dropout_key).relu_(), dropout_key)
        gate = None if self.w_gate is None else self.w_gate(x, dropout_key)
        linear = self.w_out
        if linear.has_magnitudes:
            up = self.w_in(x, dropout_key)
            return linear(self.activation.differentiable_forward(up, up if gate is None else gate), dropout_key)
        a, b = (
            None if matrix is None else cast_parameter(matrix, x.dtype)
            for matrix in (linear.weight_lora_a, linear.weight_lora_b)
        )
        w = matrix_operand(linear, "weight", x.dtype)
        adapter = linear.lora_scale, linear.dropout_masks(dropout_key)
        return _ActivatedLinear.apply(self.w_in(x, dropout_key), gate, w, a, b, adapter, self.activation)


class _ActivatedLinear(torch.autograd.Function):
    """act(up, gate) · wᵀ, for `up` and `gate` `[t, hidden]` and `w` `[M, hidden]`, plus a LoRA adapter `a`
    `[r, hidden]` and `b` `[M, r]`. Hidden states and the activated gate are recomputed in the backward pass, not saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        up: Tensor,
        gate: Tensor | None,
        w: Tensor | QuantizedWeight,
        a: Tensor | None,
        b: Tensor | None,
        adapter: tuple[float, DropoutMasks | None],
        activation: Activation,
    ) -> Tensor:
        matrix, scales = w.tensors if isinstance(w, QuantizedWeight) else (narrow(w, up.dtype), None)
        ctx.save_for_backward(up, gate, matrix, scales, a, b)
        ctx.settings = adapter, activation, w.scheme if isinstance(w, QuantizedWeight) else None
        ctx.parameter = w
        scale, dropout = adapter
        hidden_states = activation.forward(up, gate)
        y = product(
            hidden_states, (w.dequantize(hidden_states.dtype) if isinstance(w, QuantizedWeight) else matrix).t()
        )
        if a is None or b is None or scale == 0:
            return y
        hidden_states = hidden_states if dropout is None else dropout.apply_to(hidden_states)
        return add_product(y, product(hidden_states, a.t()), b.t(), scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        up, gate, w, scales, a, b = ctx.saved_tensors
        (scale, dropout), activation, scheme = ctx.settings
        hidden_states, gate_activation = activation.recompute(up, gate)
        d_w = None
        if ctx.needs_input_grad[2]:
            d_w = weight_gradient(ctx.parameter, partial(product, d_y.t(), hidden_states))
        if scheme is not None:
            w = QuantizedWeight(w, scales, scheme).dequantize(d_y.dtype)
        d_hidden, d_a, d_b = product(d_y, w), None, None
        if a is not None:
            d_low = product(d_y, b).mul_(scale)
            adapter_input = hidden_states if dropout is None else dropout.apply_to(hidden_states)
            d_a = product(d_low.t(), adapter_input)
            d_b = product(d_y.t(), product(adapter_input, a.t()).mul_(scale))
            if dropout is None:
                add_product(d_hidden, d_low, a)
            else:
                d_hidden += dropout.apply_to(product(d_low, a))
            del adapter_input
        del hidden_states, w
        d_up, d_gate = activation.backward(d_hidden, up, gate, gate_activation)
        return d_up, d_gate, d_w, d_a, d_b, None, None
