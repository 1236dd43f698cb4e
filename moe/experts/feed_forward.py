"""Feed-forward pass of experts over rows sorted by expert: two matrices and an activation, or three if it is gated."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe.experts.activation import Activation
from moe.experts.products import GroupedProducts, SegmentProducts
from moe.experts.weight_gradients import WeightGradient, WeightGradients, write_product
from moe.experts.weights import ExpertSettings, ExpertWeights
from moe.parallel import GradBuffer
from moe.parallel.accelerator import accelerator


class ExpertComputation(ABC):
    """Computation of expert outputs from rows, on this rank or on others."""

    @abstractmethod
    def run(self, rows: Tensor, scale: Tensor, weights: ExpertWeights) -> Tensor:
        """Return outputs `[n, M]` of `rows` `[n, M]`, times `scale` `[n]`; of kernels that gather and sum rows, sums
        `[T, M]` for tokens `[T, M]` and `scale` `[T, K]`. Differentiable in both and in `weights`, which are those of
        the experts on this rank."""


@dataclass(frozen=True)
class LocalComputation(ExpertComputation):
    """Computation by the experts on this rank, of rows sorted by expert."""

    counts: list[int]
    """Rows per expert."""
    activation: Activation
    products: GroupedProducts
    recompute: bool = False
    """Recompute the products of the first matrices in the backward pass instead of saving them."""

    def run(self, rows: Tensor, scale: Tensor, weights: ExpertWeights) -> Tensor:
        return feed_forward(rows, scale, weights, self)


@dataclass(frozen=True)
class ReferenceComputation(ExpertComputation):
    """Slow, obvious computation by the experts on this rank, of rows sorted by expert."""

    counts: list[int]
    """Rows per expert."""
    activation: Activation

    def run(self, rows: Tensor, scale: Tensor, weights: ExpertWeights) -> Tensor:
        return feed_forward_reference(rows, scale, weights.to(rows.dtype), self.counts, self.activation)


_SEGMENTS = SegmentProducts()

SavedProducts = tuple[Tensor | None, Tensor | None]
"""Saved products of the first matrices, `up` and `gate`; None if recomputed or absent."""


def forward_pass(
    x: Tensor, scale: Tensor, w: ExpertWeights, computation: LocalComputation
) -> tuple[Tensor, SavedProducts]:
    """Return (`[n, M]`: scale · (act(x · w_in[e] + b_in[e]) · w_out[e] + b_out[e]), products for `backward_pass`).

    `x` `[n, M]` sorted by expert; `scale` `[n]` is applied before or after w_out, where rows are narrower.
    """
    up, gate = _first_products(x, w, computation)
    column = scale.to(x.dtype)[:, None]
    hidden_states = computation.activation.forward(up, gate)
    narrow_hidden = hidden_states.shape[1] < x.shape[1]
    if narrow_hidden:
        hidden_states = _scale_rows(hidden_states, column, up)
    out = computation.products.forward(hidden_states, w.matrix("w_out", hidden_states.dtype), computation.counts)
    if w.out_lora_a is not None:
        _add(
            out,
            low_rank(hidden_states, w.out_lora_a, w.settings.out_lora_scale, computation),
            w.out_lora_b,
            computation,
        )
    if not narrow_hidden:
        out *= column
    if w.b_out is not None:
        out[:, w.bias_columns] += _repeat_by_row(w.b_out, computation.counts) * column
    return out, (None, None) if computation.recompute else (up, gate)


def backward_pass(
    d_out: Tensor,
    x: Tensor,
    scale: Tensor,
    w: ExpertWeights,
    saved_products: SavedProducts,
    computation: LocalComputation,
    gradients: WeightGradients,
) -> tuple[Tensor, Tensor]:
    """Return (gradient of x, gradient of scale). Weight gradients go to `gradients`, zeros for an expert without rows.

    Hidden states are recomputed, and give the gradient of scale without saved outputs. Operations are ordered to
    minimize peak memory.
    """
    counts, products, column = computation.counts, computation.products, scale.to(x.dtype)[:, None]
    up, gate = saved_products
    if up is None:
        up, gate = _first_products(x, w, computation)
    hidden_states, gate_activation = computation.activation.recompute(up, gate)
    w_out = w.matrix("w_out", d_out.dtype)
    d_hidden = products.input_gradient(d_out, w_out, counts)  # of hidden states times scale
    del w_out
    if w.out_lora_a is not None:
        assert w.out_lora_b is not None
        d_low = _low_gradient(d_out, w.out_lora_b, w.settings.out_lora_scale, computation)
        _add(d_hidden, d_low, w.out_lora_a.transpose(1, 2), computation)
    d_scale = _dot_by_row(d_hidden, hidden_states, scale.dtype)
    if hidden_states.shape[1] < x.shape[1]:
        hidden_states = _scale_rows(hidden_states, column, up)
        _multiply(hidden_states, d_out, computation, gradients.w_out)
    elif gradients.w_out is not None:
        _multiply(hidden_states, d_out * column, computation, gradients.w_out)
    if w.out_lora_a is not None:
        is_scaled = hidden_states.shape[1] < x.shape[1]
        low = low_rank(hidden_states, w.out_lora_a, w.settings.out_lora_scale, computation)
        _multiply(low if is_scaled else low.mul_(column), d_out, computation, gradients.out_lora_b)
        _multiply(hidden_states, d_low if is_scaled else d_low.mul_(column), computation, gradients.out_lora_a)
        del low, d_low
    del hidden_states
    d_up, d_gate = computation.activation.backward(d_hidden.mul_(column), up, gate, gate_activation)
    del gate_activation, d_hidden

    d_x = products.input_gradient(d_up, w.matrix("w_in", d_up.dtype), counts)
    if d_gate is not None:
        d_x = products.input_gradient(d_gate, w.matrix("w_gate", d_gate.dtype), counts, onto=d_x)
    if w.in_lora_a is not None:
        assert w.in_lora_b is not None
        d_low = _low_gradient(d_up, w.in_lora_b, w.settings.in_lora_scale, computation)
        low = low_rank(x, w.in_lora_a, w.settings.in_lora_scale, computation)
        _multiply(low, d_up, computation, gradients.in_lora_b)
        if d_gate is not None:
            assert w.gate_lora_b is not None
            d_low += _low_gradient(d_gate, w.gate_lora_b, w.settings.in_lora_scale, computation)
            _multiply(low, d_gate, computation, gradients.gate_lora_b)
        _multiply(x, d_low, computation, gradients.in_lora_a)
        _add(d_x, d_low, w.in_lora_a.transpose(1, 2), computation)
        del low, d_low
    if w.b_out is not None:
        d_biased = d_out[:, w.bias_columns]
        d_scale += _dot_by_row(d_biased, _repeat_by_row(w.b_out, counts), scale.dtype)
        _sum_by_expert(d_up, computation, gradients.b_in)
        _sum_by_expert(d_biased * column, computation, gradients.b_out)
        if d_gate is not None:
            _sum_by_expert(d_gate, computation, gradients.b_gate)
    _multiply(x, d_up, computation, gradients.w_in)
    del d_up
    if d_gate is not None:
        _multiply(x, d_gate, computation, gradients.w_gate)
    return d_x, d_scale


def low_rank(x: Tensor, a: Tensor, scale: float, computation: LocalComputation) -> Tensor:
    """`[n, r]`: scale · x · a[e], for rows `[n, in]` and an adapter's A `[E, in, r]`."""
    return _backend_for_widths(a.shape[1:], x, computation).forward(x, a, computation.counts).mul_(scale)


def _low_gradient(d_y: Tensor, b: Tensor, scale: float, computation: LocalComputation) -> Tensor:
    """`[n, r]`: gradient of x · a[e], from the gradient of the output of an adapter's B `[E, r, out]`."""
    return _backend_for_widths(b.shape[1:], d_y, computation).input_gradient(d_y, b, computation.counts).mul_(scale)


def _add(y: Tensor, low: Tensor, b: Tensor | None, computation: LocalComputation) -> None:
    """Add low · b[e] to `y` `[n, out]`, for `low` `[n, r]` and `b` `[E, r, out]`."""
    assert b is not None
    _backend_for_widths(b.shape[1:], y, computation).input_gradient(low, b.transpose(1, 2), computation.counts, onto=y)


def _backend_for_widths(widths: tuple[int, ...], x: Tensor, computation: LocalComputation) -> GroupedProducts:
    """The backend, or segments if it does not support these widths, such as an adapter's rank."""
    return computation.products if computation.products.supports(x.dtype, x.device.type, widths) else _SEGMENTS


def _multiply(x: Tensor, d_y: Tensor, computation: LocalComputation, gradient: WeightGradient | None) -> None:
    if gradient is None:  # not trained
        return
    products = _backend_for_widths((x.shape[1], d_y.shape[1]), x, computation)
    gradient.add(partial(write_product, products, x, d_y, computation.counts))


def _scale_rows(hidden_states: Tensor, column: Tensor, up: Tensor) -> Tensor:
    """`hidden_states` · `column`, in place unless they are the saved `up`."""
    return hidden_states * column if hidden_states is up else hidden_states.mul_(column)


_BLOCKS = 16


def _dot_by_row(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`[n]`: dot products of the rows of `a` and `b` `[n, H]` in `dtype`, in blocks if they have to be widened."""
    if a.dtype == dtype:
        return torch.linalg.vecdot(a, b)
    size = max(1, -(-a.shape[0] // _BLOCKS))
    blocks = zip(a.split(size), b.split(size), strict=True)
    return torch.cat([torch.linalg.vecdot(a_block.to(dtype), b_block.to(dtype)) for a_block, b_block in blocks])


def _first_products(x: Tensor, w: ExpertWeights, computation: LocalComputation) -> tuple[Tensor, Tensor | None]:
    up, gate = _up_and_gate(x, w, computation)
    if w.in_lora_a is not None:
        low = low_rank(x, w.in_lora_a, w.settings.in_lora_scale, computation)
        _add(up, low, w.in_lora_b, computation)
        if gate is not None:
            _add(gate, low, w.gate_lora_b, computation)
    if w.b_in is not None:
        up += _repeat_by_row(w.b_in, computation.counts)
    if gate is not None and w.b_gate is not None:
        gate += _repeat_by_row(w.b_gate, computation.counts)
    return computation.activation.prepare_up(up), gate


def _up_and_gate(x: Tensor, w: ExpertWeights, computation: LocalComputation) -> tuple[Tensor, Tensor | None]:
    w_in_and_gate = w.w_in_and_gate
    if w_in_and_gate is not None:
        up, gate = computation.products.forward(x, w_in_and_gate, computation.counts).chunk(2, dim=1)
        return up, gate
    up = computation.products.forward(x, w.matrix("w_in", x.dtype), computation.counts)
    if w.w_gate is None:
        return up, None
    return up, computation.products.forward(x, w.matrix("w_gate", x.dtype), computation.counts)


def feed_forward(x: Tensor, scale: Tensor, weights: ExpertWeights, computation: LocalComputation) -> Tensor:
    """Differentiable `forward_pass`: in x, scale and all weights, which may have a wider dtype than the rows."""
    x = x.contiguous()
    if not torch.is_grad_enabled():
        return forward_pass(x, scale, weights.narrow(x.dtype), computation)[0]
    return _ExpertFeedForward.apply(x, scale, computation, weights.settings, *weights.tensors)


class _ExpertFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        computation: LocalComputation,
        settings: ExpertSettings,
        *tensors: Tensor | None,
    ) -> Tensor:
        weights = ExpertWeights.from_tensors(tensors, settings).narrow(x.dtype)
        out, intermediates = forward_pass(x, scale, weights, computation)
        ctx.save_for_backward(x, scale, *intermediates, *weights.tensors)
        ctx.settings, ctx.parameters = (computation, settings), tensors
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, up, gate, *tensors = ctx.saved_tensors
        computation, settings = ctx.settings
        weights = ExpertWeights.from_tensors(tensors, settings)
        weight_gradients = WeightGradients(ctx.parameters)
        d_x, d_scale = backward_pass(
            gradients[0].contiguous(), x, scale, weights, (up, gate), computation, weight_gradients
        )
        return d_x, d_scale, None, None, *weight_gradients.to_autograd()


def _repeat_by_row(bias: Tensor, counts: list[int]) -> Tensor:
    """`[n, width]`: bias of each row's expert, from `bias` `[E, width]`."""
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return bias.index_select(0, accelerator(bias.device).take(expert))


def _sum_by_expert(rows: Tensor, computation: LocalComputation, gradient: WeightGradient | None) -> None:
    """Write the sums `[E, width]`, at least float32, in a deterministic order."""
    if gradient is not None:
        gradient.add(partial(_write_sums, rows, computation.counts))


def _write_sums(rows: Tensor, counts: list[int], buffer: GradBuffer) -> None:
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    buffer.write(torch.stack([part.sum(0) for part in wide.split(counts)]))


def feed_forward_reference(
    x: Tensor, scale: Tensor, weights: ExpertWeights, counts: list[int], activation: Activation
) -> Tensor:
    """Reference of `feed_forward`: one expert after another, in plain operations."""
    w, outputs = weights.to(x.dtype) if weights.is_quantized else weights, []
    for e, rows in enumerate(x.split(counts)):
        in_scale, out_scale = w.settings.in_lora_scale, w.settings.out_lora_scale
        up = _add_adapter(rows, w.w_in, w.in_lora_a, w.in_lora_b, in_scale, e) + (0 if w.b_in is None else w.b_in[e])
        gate = up
        if w.w_gate is not None:
            gate = _add_adapter(rows, w.w_gate, w.in_lora_a, w.gate_lora_b, in_scale, e)
            gate = gate + (0 if w.b_gate is None else w.b_gate[e])
        hidden_states = activation.differentiable_forward(up, gate)
        out = _add_adapter(hidden_states, w.w_out, w.out_lora_a, w.out_lora_b, out_scale, e)
        outputs.append(out if w.b_out is None else out + w.b_out[e])
    return torch.cat(outputs) * scale.to(x.dtype)[:, None]


def _add_adapter(x: Tensor, matrix: Tensor, a: Tensor | None, b: Tensor | None, scale: float, e: int) -> Tensor:
    """x · (matrix + scale · a · b) of one expert."""
    return x @ (matrix[e] if a is None or b is None else matrix[e] + scale * a[e] @ b[e])
