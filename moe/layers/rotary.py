"""Position embeddings: rotary (RoPE, arXiv 2104.09864), with frequency scaling for longer sequences, and sinusoidal."""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.kernels.support import has_kernels
from moe.overrides import overridable
from moe.parallel import as_dtype
from moe.spec.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

Pairing = Literal["half", "interleaved"]


def frequencies(
    dim: int,
    base: float,
    scaling: RopeScaling | None = None,
    num_positions: Tensor | None = None,
    *,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, float | Tensor]:
    """Return (angle of each pair at position 1, float64 `[dim / 2]`; factor for cosines and sines).

    Only dynamic scaling and LongRoPE use `num_positions` int64 `[...]`, sequence lengths, and then return angles
    `[..., dim / 2]`, LongRoPE also factors `[..., 1]`; without it, lengths of at most `original_tokens` are assumed.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    match scaling:
        case None:
            return base**-exponents, 1.0
        case LinearScaling():
            return base**-exponents / scaling.factor, 1.0
        case DynamicScaling():
            return _dynamic(exponents, base, scaling, num_positions), 1.0
        case Llama3Scaling():
            return _llama3(base**-exponents, scaling), 1.0
        case YarnScaling():
            return _yarn(base**-exponents, base, scaling), _yarn_attention_factor(scaling)
        case LongRopeScaling():
            return _longrope(base**-exponents, scaling, num_positions)


def _longrope(rates: Tensor, scaling: LongRopeScaling, num_positions: Tensor | None) -> tuple[Tensor, float | Tensor]:
    short_rates = rates / rates.new_tensor(scaling.short_factors)
    if num_positions is None:
        return short_rates, scaling.short_mscale
    is_long = (num_positions > scaling.original_tokens)[..., None]
    long_rates = rates / rates.new_tensor(scaling.long_factors)
    short_mscale, long_mscale = rates.new_tensor((scaling.short_mscale, scaling.long_mscale))
    return torch.where(is_long, long_rates, short_rates), torch.where(is_long, long_mscale, short_mscale)


def _dynamic(exponents: Tensor, base: float, scaling: DynamicScaling, num_positions: Tensor | None) -> Tensor:
    """NTK-aware scaling of the base, by the length of each row."""
    if num_positions is None:
        return base**-exponents
    dim = 2 * exponents.numel()
    lengths = num_positions.to(torch.float64).clamp(min=scaling.original_tokens)[..., None]
    stretch = scaling.factor * lengths / scaling.original_tokens - (scaling.factor - 1)
    return (base * stretch ** (dim / (dim - 2))) ** -exponents


def _llama3(rates: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = rates * (scaling.original_tokens / (2 * math.pi))
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    smooth = (turns >= low).to(turns.dtype) if low == high else ((turns - low) / (high - low)).clamp(0, 1)
    return rates * (smooth + (1 - smooth) / scaling.factor)


def _yarn(rates: Tensor, base: float, scaling: YarnScaling) -> Tensor:
    """Equations 15 to 17 of arXiv 2309.00071, with the ramp over dimensions rather than rotations, as in the authors'
    code and other implementations."""
    dim = 2 * rates.numel()

    def turning(times: float) -> float:
        """Index, possibly fractional, of the pair that rotates `times` times within the original length."""
        return dim * math.log(scaling.original_tokens / (times * 2 * math.pi)) / (2 * math.log(base))

    first, last = turning(scaling.beta_fast), turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    pairs = torch.arange(rates.numel(), dtype=torch.float64, device=rates.device)
    ramp = ((pairs - first) / width).clamp(0, 1)
    return rates * (1 - ramp + ramp / scaling.factor)


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_scale(scaling.factor, scaling.mscale) / yarn_scale(scaling.factor, scaling.mscale_all_dim)
    return yarn_scale(scaling.factor)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """M(s, c) = 1 + 0.1 · c · ln s, at least 1: YaRN's scale of queries and keys. Multi-head latent attention
    multiplies its score scale by M(factor, mscale_all_dim)²."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotary_table(
    positions: Tensor,
    head_dim: int,
    rope: RopeSpec,
    *,
    dtype: torch.dtype = torch.float32,
    num_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (cosines, sines), `[B, 1, L, r / 2]` each, for `rotate` of heads `[B, n, L, head_dim]` at `positions`
    int64 `[B, L]`. Computed in float64, returned in `dtype` but at least float32.

    `num_positions`, for dynamic scaling and LongRoPE: int64 `[B]`, length of each row, or `[B, L]`, length of each
    position's document. By default the row's last position plus 1, so that a sequence has the same angles in any batch.
    """
    dim = rope.rotated_dim(head_dim)
    if isinstance(rope.scaling, DynamicScaling | LongRopeScaling) and num_positions is None and positions.shape[1]:
        num_positions = positions.amax(dim=1) + 1
    rates, factor = frequencies(dim, rope.base, rope.scaling, num_positions, device=positions.device)
    if rope.proportional:
        rates[rope.num_rotating_pairs(head_dim) :] = 0
    angles = positions[..., None].to(torch.float64) * (rates[:, None] if rates.dim() == 2 else rates)
    if isinstance(factor, Tensor) and factor.dim() == 2:  # `[B, 1]`
        factor = factor[:, None]
    wide = torch.promote_types(dtype, torch.float32)
    return (angles.cos() * factor).to(wide)[:, None], (angles.sin() * factor).to(wide)[:, None]


@overridable
def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing = "half") -> Tensor:
    """Rotate the first r / 2 pairs of dimensions of `x` `[..., L, d]`, keeping its dtype and memory order. `cos` and
    `sin` are broadcastable to `[..., L, r / 2]` and get no gradient; dimensions from r on are unchanged."""
    if has_kernels(x, "rotary") and _suits_kernel(x, cos, sin):
        from moe.kernels import rotary

        return rotary.rotate(x, cos, sin, interleaved=pairing == "interleaved")
    if not torch.is_grad_enabled():
        return _rotate(x, cos, sin, pairing, 1)
    return _Rotation.apply(x, cos, sin, pairing)


def _suits_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether `x` is `[B, n, L, d]` and both tables `[B or 1, 1, L, r / 2]`, with elements of at most four bytes."""
    return (
        cos.dim() == x.dim() == 4
        and cos.shape == sin.shape
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1:3] == (1, x.shape[2])
        and 0 < 2 * cos.shape[3] <= x.shape[3]
        and max(x.dtype.itemsize, cos.dtype.itemsize, sin.dtype.itemsize) <= 4
    )


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing = "half") -> Tensor:
    """Reference of `rotate`, in plain operations."""
    first, second = _pairs(x, cos.shape[-1], pairing)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotary_part = torch.cat(pair, dim=-1) if pairing == "half" else torch.stack(pair, dim=-1).flatten(-2)
    return torch.cat((rotary_part.to(x.dtype), x[..., 2 * cos.shape[-1] :]), dim=-1)


def _pairs(x: Tensor, num_pairs: int, pairing: Pairing) -> tuple[Tensor, Tensor]:
    if pairing == "half":
        return x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs]
    return x[..., 0 : 2 * num_pairs : 2], x[..., 1 : 2 * num_pairs : 2]


class _Rotation(torch.autograd.Function):
    """Rotates back in the backward pass; saves only the table, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairing = pairing
        return _rotate(x, cos, sin, pairing, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradients[0], cos, sin, ctx.pairing, -1), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing, sign: int) -> Tensor:
    # Forward and backward of [4, 8, 512, 64] on two EPYC cores, in float32 and bfloat16: 2.3 and 2.8 ms in halves, 1.3
    # and 2.0 interleaved; by the usual products with full-width tables 5.3 and 3.2; interleaved as strided halves 6.0
    # and 7.1.
    dim, wide = 2 * cos.shape[-1], torch.promote_types(x.dtype, cos.dtype)
    part = x if dim == x.shape[-1] else x[..., :dim]
    part = as_dtype(part, wide)
    if pairing == "half":
        first, second = part.chunk(2, dim=-1)
        out = part * torch.cat((cos, cos), dim=-1)
        first_out, second_out = out.chunk(2, dim=-1)
        first_out.addcmul_(second, sin, value=-sign)
        second_out.addcmul_(first, sin, value=sign)
    else:
        factors = torch.complex(cos, sign * sin).to(wide.to_complex())
        out = torch.view_as_real(torch.view_as_complex(_as_pairs(part)) * factors).flatten(-2)
    if dim == x.shape[-1]:
        return as_dtype(out, x.dtype)
    rotated = torch.empty_like(x)
    rotated[..., :dim], rotated[..., dim:] = out, x[..., dim:]
    return rotated


def _as_pairs(part: Tensor) -> Tensor:
    """`[..., r / 2, 2]`, with the layout that `view_as_complex` requires."""
    *outer_strides, last = part.stride()
    is_paired = last == 1 and not (part.storage_offset() % 2 or any(stride % 2 for stride in outer_strides))
    # Not contiguous(), which does not move a single vector, or an empty tensor.
    return (part if is_paired else part.clone(memory_format=torch.contiguous_format)).unflatten(-1, (-1, 2))


def sinusoids(num_positions: int, dim: int, *, start: int = 0, device: torch.device) -> Tensor:
    """float64 `[num_positions, dim]` for positions from `start`: sines in the first half, cosines in the second."""
    positions = torch.arange(start, start + num_positions, dtype=torch.float64, device=device)
    half = dim // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float64, device=device) * (-math.log(1e4) / max(1, half - 1)))
    angles = positions[:, None] * rates
    table = torch.cat((angles.sin(), angles.cos()), dim=1)
    return torch.nn.functional.pad(table, (0, dim % 2))
