"""Linear layer with optional bias, LoRA and quantized weight."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from moe.layers.adapter_dropout import AdapterDropout, DropoutKey, DropoutMasks
from moe.layers.token_rows import TokenIds
from moe.overrides import overridable
from moe.parallel import (
    Layout,
    QuantizedWeight,
    cast_parameter,
    collective,
    deferred_gradients,
    matrix_of,
    narrow,
    shard_of,
    weight_gradient,
)
from moe.parallel.accelerator import multiplies

_NORM_ELEMENTS = 1 << 22
"""Elements of a weight whose norms are computed at a time."""


class Linear(nn.Module):
    """x · weightᵀ, plus a LoRA adapter and a bias if it has them. DoRA's magnitudes scale the outputs without the bias;
    token rows replace rows of the weight."""

    weight: nn.Parameter
    """`[out, in]`, or its quantized codes"""
    bias: nn.Parameter | None
    """`[out]`"""
    weight_lora_a: nn.Parameter | None
    """`[r, in]`: LoRA adapter, with the next."""
    weight_lora_b: nn.Parameter | None
    """`[out, r]`"""
    weight_lora_m: nn.Parameter | None
    """`[out]`: DoRA's magnitudes."""
    token_rows: nn.Parameter | None
    """`[n, in]`: trained rows of `token_ids`."""
    token_ids: tuple[int, ...] = ()
    lora_scales: Mapping[str, float] = MappingProxyType({})
    """Scale of the adapter, by the name `weight`."""
    dropout: AdapterDropout | None = None
    """Dropout of the adapter's input."""
    _token_rows_ids: TokenIds | None = None
    _decoding_norms: Tensor | None = None
    _norm_group: dist.ProcessGroup | None = None
    """Ranks that split the weight's inputs."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "weight_lora_a", "weight_lora_b", "weight_lora_m", "token_rows"):
            self.register_parameter(name, None)

    def set_layout(self, layout: Layout) -> None:
        if self.token_ids:
            self._token_rows_ids = TokenIds(self.token_ids, layout.device)
        if self.weight_lora_a is None:
            return
        if self.dropout is not None:
            self.dropout = self.dropout.for_shard(self.weight_lora_a, layout)
        if ("tensor", 1) in shard_of(self.weight_lora_a).splits:
            self._norm_group = layout.group("tensor")

    def forward(self, x: Tensor, dropout_key: DropoutKey | None = None, row_norms: Tensor | None = None) -> Tensor:
        """Return `[..., out]` in the dtype of `x` `[..., in]`. `dropout_key` keys the adapter's dropout in training;
        `row_norms`: result of that method, if known."""
        return self.add_bias(self.product(x, dropout_key, row_norms))

    def product(self, x: Tensor, dropout_key: DropoutKey | None = None, row_norms: Tensor | None = None) -> Tensor:
        """`forward` without the bias, for partial results that are summed first."""
        y, a, b = linear(x, matrix_of(self, "weight")), self.weight_lora_a, self.weight_lora_b
        masks = self.dropout_masks(dropout_key)
        if not self.has_magnitudes:
            return self._replace_rows(add_adapter(y, x, a, b, self.lora_scale, masks), x)
        gains = self._gains(row_norms).to(y.dtype)
        if masks is None:
            return add_adapter(y, x, a, b, self.lora_scale) * gains
        dropped_x = masks.apply_to(x)  # as in PEFT, also for the weight's product that the gains apply to
        dropped_y = linear(dropped_x, matrix_of(self, "weight"))
        return y - dropped_y + add_adapter(dropped_y.clone(), dropped_x, a, b, self.lora_scale) * gains

    @property
    def has_magnitudes(self) -> bool:
        """Whether DoRA's magnitudes apply."""
        return self.weight_lora_m is not None and self.lora_scale != 0

    def _replace_rows(self, y: Tensor, x: Tensor) -> Tensor:
        """Replace the outputs `[..., out]` of token rows."""
        if self.token_rows is None or not self.lora_scales:
            return y
        assert self._token_rows_ids is not None
        return self._token_rows_ids.replace_logits(y, linear(x, self.token_rows))

    def _gains(self, row_norms: Tensor | None = None) -> Tensor:
        """`[out]`, float32 or wider: magnitudes divided by the norms of the adapted weight's rows (DoRA, eq. 5), which
        are constants to gradients (section 4.3)."""
        assert self.weight_lora_m is not None
        return self.weight_lora_m / (self.row_norms() if row_norms is None else row_norms)

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """`[out]`: L2 norms of the rows of weight + scale · B · A, over the inputs on all ranks. Computed in blocks of
        rows, in float32 or wider."""
        if self._decoding_norms is not None:
            return self._decoding_norms
        assert self.weight_lora_a is not None
        assert self.weight_lora_b is not None
        wide = torch.promote_types(self.weight_lora_b.dtype, torch.float32)
        matrix, a, b = matrix_of(self, "weight"), self.weight_lora_a.to(wide), self.weight_lora_b.to(wide)
        weight = matrix.dequantize(wide) if isinstance(matrix, QuantizedWeight) else matrix
        step = max(1, _NORM_ELEMENTS // weight.shape[1])
        blocks = zip(weight.split(step), b.split(step), strict=True)
        squares = torch.cat(
            [torch.addmm(rows.to(wide), rows_b, a, alpha=self.lora_scale).square_().sum(1) for rows, rows_b in blocks]
        )
        if self._norm_group is not None:
            with collective("all-reduce of the norms of an adapted matrix"):
                dist.all_reduce(squares, group=self._norm_group)
        return squares.sqrt_()

    def prepare_for_decoding(self) -> None:
        """Compute the norms for DoRA once. For inference only."""
        self._decoding_norms = self.row_norms() if self.has_magnitudes else None

    def _adapted_weight(self, dtype: torch.dtype) -> Tensor:
        """`[out, in]` in `dtype`: weight + scale · B · A."""
        matrix = matrix_of(self, "weight")
        weight = matrix.dequantize(dtype) if isinstance(matrix, QuantizedWeight) else cast_parameter(matrix, dtype)
        if self.weight_lora_a is None or self.weight_lora_b is None:
            return weight
        return weight + self.lora_scale * product(self.weight_lora_b.to(dtype), self.weight_lora_a.to(dtype))

    @property
    def lora_scale(self) -> float:
        return self.lora_scales.get("weight", 0.0)

    def dropout_masks(self, dropout_key: DropoutKey | None) -> DropoutMasks | None:
        """Dropout masks of the adapter's input, if it has dropout."""
        return None if self.dropout is None else self.dropout.masks_for(dropout_key)

    def merged_weight(self, dtype: torch.dtype) -> Tensor:
        """`[out, in]`: the weight in `dtype` with the adapter merged."""
        weight = self._adapted_weight(dtype)
        return weight * self._gains().to(dtype)[:, None] if self.has_magnitudes else weight

    def add_bias(self, y: Tensor) -> Tensor:
        """Add the bias, if any, to `y` `[..., out]`."""
        return y if self.bias is None else y + self.bias.to(y.dtype)


def matrix_operand(module: nn.Module, name: str, dtype: torch.dtype) -> Tensor | QuantizedWeight:
    """A module's matrix as an operand of `product`: quantized, or as in `operand`."""
    matrix = matrix_of(module, name)
    return matrix if isinstance(matrix, QuantizedWeight) else operand(matrix, dtype)


def operand(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter as an operand of `linear` and `product`: in `dtype`, or itself if its gradient is deferred."""
    return cast_parameter(parameter, dtype) if deferred_gradients(parameter) is None else parameter


@overridable
def uses_own_dtype(x: Tensor) -> bool:
    """Whether products of `x` are computed in its dtype, rather than in float32."""
    return multiplies(x.dtype, x.device)


def linear(x: Tensor, weight: Tensor | QuantizedWeight) -> Tensor:
    """`[..., out]`: x · weightᵀ, in the dtype of `x` `[..., in]`, to which a wider `weight` `[out, in]` is rounded."""
    if isinstance(weight, QuantizedWeight):
        return _QuantizedProduct.apply(x, weight, True)
    if deferred_gradients(weight) is not None:
        return _DeferredProduct.apply(x, weight, True)
    if uses_own_dtype(x):
        return functional.linear(x, cast_parameter(weight, x.dtype))
    # Forward and backward of [2048, 512] by [512, 512] in bfloat16, on one EPYC core without bfloat16 instructions:
    # 1,520 ms by torch's kernel, 53 by this.
    return _WideLinear.apply(x, weight)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[t, out]`: x · weightᵀ + bias in the dtype of `weight` `[out, in]`, for `x` `[t, in]` of a narrower dtype, also
    under autocast. Saves `x` in its own dtype and casts it again in the backward pass."""
    return _LinearInWideDtype.apply(x, weight, bias)


def add_adapter(
    y: Tensor, x: Tensor, a: Tensor | None, b: Tensor | None, scale: float, masks: DropoutMasks | None = None
) -> Tensor:
    """Add a LoRA adapter's output to `y` `[..., out]` in place, if `a` `[r, in]` and `b` `[out, r]` are given: scale ·
    (dropout(x) · aᵀ) · bᵀ for `x` `[..., in]` (arXiv 2106.09685, eq. 3)."""
    if a is None or b is None or scale == 0:
        return y
    low = linear(x, a) if masks is None else _DroppedLinear.apply(x, cast_parameter(a, x.dtype), masks)
    return y.add_(linear(low, b), alpha=scale)


def product(x: Tensor, w: Tensor | QuantizedWeight) -> Tensor:
    """x · w in the dtype of `x`, that of `w` unless its gradient is deferred: `[t, out]` for `x` `[t, in]` and `w`
    `[in, out]`."""
    if isinstance(w, QuantizedWeight):
        return _QuantizedProduct.apply(x, w, False)
    if deferred_gradients(w) is not None:
        return _DeferredProduct.apply(x, w, False)
    if uses_own_dtype(x):
        return x @ w
    # Forward and backward of shared experts, 512 rows by 256 hidden units, on the same core: 198 ms by torch, 13 by
    # this.
    return _WideProduct.apply(x, w)


def add_product(y: Tensor, x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    """Add scale · x · w to `y` `[t, out]` in place, multiplied as in `product`."""
    if multiplies(x.dtype, x.device):
        return y.addmm_(x, w, alpha=scale)
    return y.add_(product(x, w), alpha=scale)


class _WideLinear(torch.autograd.Function):
    """`linear` of narrow dtypes, computed in float32. Saved tensors are narrow; the gradient of a wide weight is not
    rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        narrow_weight = narrow(weight, x.dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, narrow_weight)
        ctx.parameter = weight
        return functional.linear(x.float(), narrow_weight.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wide_TO, d_x, d_weight = gradient.reshape(-1, gradient.shape[-1]).float(), None, None
        if ctx.needs_input_grad[0]:
            d_x = _with_leading_dims(gradient, (wide_TO @ weight.float()).to(gradient.dtype))
        if ctx.needs_input_grad[1]:
            d_weight = weight_gradient(ctx.parameter, lambda: wide_TO.t() @ x.reshape(-1, x.shape[-1]).float())
        return d_x, d_weight


_CAST_ROWS = 1024
"""Rows cast at a time on a CPU: their wide copy stays in its cache, and needs no new memory."""


def _weight_gradient(a: Tensor, b: Tensor) -> Tensor:
    """`[m, n]`: aᵀ · b in the wider dtype of `a` `[t, m]` and `b` `[t, n]`."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    if a.device.type != "cpu" or a.shape[0] <= _CAST_ROWS:
        return a.to(dtype).t() @ b.to(dtype)
    sums = a.new_zeros(a.shape[1], b.shape[1], dtype=dtype)
    for rows_a, rows_b in zip(a.split(_CAST_ROWS), b.split(_CAST_ROWS), strict=True):
        sums.addmm_(rows_a.to(dtype).t(), rows_b.to(dtype))
    return sums


class _LinearInWideDtype(torch.autograd.Function):
    """`wide_linear`. Gradients of the weight have the weight's memory order, as in torch's linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.x_dtype, ctx.is_contiguous = x.dtype, weight.is_contiguous()
        with _autocast_disabled(x):
            return functional.linear(x.to(weight.dtype), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), d_x, d_weight = ctx.saved_tensors, None, None
        with _autocast_disabled(gradient):
            if weight is not None:
                d_x = (gradient @ weight).to(ctx.x_dtype)
            if x is not None:
                d_weight = _weight_gradient(gradient, x) if ctx.is_contiguous else _weight_gradient(x, gradient).t()
        return d_x, d_weight, gradient.sum(0) if ctx.needs_input_grad[2] else None


def _autocast_disabled(x: Tensor) -> AbstractContextManager[object]:
    device = x.device.type
    is_enabled = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_enabled else nullcontext()


class _DroppedLinear(torch.autograd.Function):
    """dropout(x) · aᵀ, for `x` `[..., in]` and `a` `[r, in]`. Saves only x and a; masks are regenerated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, masks: DropoutMasks) -> Tensor:
        ctx.save_for_backward(x, a)
        ctx.dropout_masks = masks
        return product(_flat(masks.apply_to(x)), a.t()).view(*x.shape[:-1], a.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_low: Tensor) -> tuple[Tensor | None, ...]:
        (x, a), d_x, d_a = ctx.saved_tensors, None, None
        d_low = _flat(d_low)
        if ctx.needs_input_grad[0]:
            d_x = ctx.dropout_masks.apply_to(product(d_low, a).view_as(x))
        if ctx.needs_input_grad[1]:
            d_a = product(d_low.t(), _flat(ctx.dropout_masks.apply_to(x)))
        return d_x, d_a, None


def _flat(x: Tensor) -> Tensor:
    """Reshape `[..., in]` to `[t, in]`."""
    return x.reshape(-1, x.shape[-1])


def _with_leading_dims(like: Tensor, flat: Tensor) -> Tensor:
    """Reshape `flat` `[t, in]` to `[..., in]`, with the leading dimensions of `like` `[..., out]`; also without
    rows."""
    return flat.view(*like.shape[:-1], flat.shape[-1])


class _WideProduct(torch.autograd.Function):
    """`product` of narrow dtypes, computed in float32. Saved tensors and results are narrow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_w else None, w if needs_x else None)
        return _matmul_float32(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad
        return _matmul_float32(gradient, w.t()) if needs_x else None, _matmul_float32(
            x.t(), gradient
        ) if needs_w else None


class _DeferredProduct(torch.autograd.Function):
    """x · w, or x · wᵀ, in the dtype of `x`, with a parameter whose gradient is deferred. One with more than two
    dimensions has its last as columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, is_transposed: bool) -> Tensor:
        narrow_w = narrow(w, x.dtype).flatten(0, -2)
        ctx.save_for_backward(x, narrow_w)
        ctx.parameter, ctx.is_transposed = w, is_transposed
        return (linear if is_transposed else product)(x, narrow_w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        flat_x, flat_gradient, d_x = _flat(x), _flat(gradient), None
        if ctx.needs_input_grad[0]:
            d_x = _with_leading_dims(gradient, product(flat_gradient, w if ctx.is_transposed else w.t()))
        left, right = (flat_gradient, flat_x) if ctx.is_transposed else (flat_x, flat_gradient)
        shape = ctx.parameter.shape
        return d_x, weight_gradient(ctx.parameter, lambda: product(left.t(), right).view(shape)), None


class _QuantizedProduct(torch.autograd.Function):
    """x · w, or x · wᵀ, with a frozen quantized matrix, dequantized in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: QuantizedWeight, is_transposed: bool) -> Tensor:
        ctx.save_for_backward(*w.tensors)
        ctx.settings = w.scheme, is_transposed
        return (linear if is_transposed else product)(x, w.dequantize(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        scheme, is_transposed = ctx.settings
        codes, scales = ctx.saved_tensors
        w = QuantizedWeight(codes, scales, scheme).dequantize(gradient.dtype)
        d_x = product(_flat(gradient), w if is_transposed else w.t())
        return _with_leading_dims(gradient, d_x), None, None


def _matmul_float32(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() @ w.float()).to(x.dtype)
