"""Quantized weights: frozen matrices stored as codes and scales, and dequantized where they are multiplied.

int8: each block of 64 values is divided by its absolute maximum over 127 and rounded (arXiv 2208.07339, eq. 1). nf4:
each value, divided by its block's absolute maximum, is rounded to one of 16 quantiles of a normal distribution (QLoRA,
arXiv 2305.14314, section 3 and appendix E). Scales are not quantized again. Both directions are computed in float32, a
bounded block at a time, so values depend neither on sharding nor on whether bitsandbytes computes them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from moe.parallel.accelerator import accelerator
from moe.parallel.block_kernels import dequantize_with_kernel
from moe.spec.form import BLOCK, block_dim, num_codes, num_scales
from moe.spec.parameter import Form, Parameter, Slices

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 NF4 values (QLoRA, appendix E)."""
_ZERO = NF4.index(0.0)
_LARGEST_INT8 = 127.0
_AT_ONCE = {"cpu": 1 << 20}
_AT_ONCE_ELSEWHERE = 1 << 24
"""Values quantized or dequantized at a time: temporaries stay in a CPU's cache, or fill a GPU."""


@dataclass(frozen=True)
class QuantScheme:
    """Storage of a quantized matrix: its form, the dimension of its blocks, and that dimension's full length."""

    form: Form
    dim: int
    length: int

    @classmethod
    def from_parameter(cls, parameter: Parameter) -> "QuantScheme | None":
        """Quantization of a declared parameter; None if it is stored at full precision."""
        if parameter.form == "full":
            return None
        dim = block_dim(parameter.dims)
        return cls(parameter.form, dim, parameter.shape[dim])

    @property
    def item_dtype(self) -> torch.dtype:
        """Dtype of codes."""
        return {"bfloat16": torch.bfloat16, "int8": torch.int8, "nf4": torch.uint8}[self.form]

    @property
    def has_scales(self) -> bool:
        return self.form != "bfloat16"

    def values_of(self, slices: Slices, *, of_scales: bool) -> Slices:
        """Slices of whole blocks of a matrix that contain the given slices of its codes or scales."""
        first, end = slices[self.dim]
        if of_scales:
            first, end = first * BLOCK, end * BLOCK
        elif self.form == "nf4":
            first, end = 2 * first // BLOCK * BLOCK, -(-2 * end // BLOCK) * BLOCK
        elif self.form == "int8":
            first, end = first // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK
        bounds = min(first, self.length), min(end, self.length)
        return (*slices[: self.dim], bounds, *slices[self.dim + 1 :])

    def codes_of(self, slices: Slices, *, of_scales: bool) -> Slices:
        """Slices of codes or scales that store the given slices of whole blocks of the matrix."""
        first, end = slices[self.dim]
        if of_scales:
            first, end = first // BLOCK, num_scales(end)
        else:
            first, end = num_codes(self.form, first), num_codes(self.form, end)
        return (*slices[: self.dim], (first, end), *slices[self.dim + 1 :])


@dataclass(frozen=True)
class QuantizedWeight:
    """Frozen quantized matrix, or the part of it that a rank multiplies by."""

    codes: Tensor
    scales: Tensor | None
    """float32, one per block."""
    scheme: QuantScheme

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        dim = self.scheme.dim
        return (*self.codes.shape[:dim], self.scheme.length, *self.codes.shape[dim + 1 :])

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        return self.codes, self.scales

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in `dtype`, without a gradient. Values are computed in float32, or bfloat16 for that form,
        regardless of `dtype`."""
        codes, scales, scheme = self.codes.detach(), self.scales, self.scheme
        if scales is None:
            return codes.to(dtype)
        matrix = torch.empty(self.shape, dtype=dtype, device=codes.device)
        for block_slices in blocks(tuple((0, size) for size in self.shape), scheme.dim, codes.device.type):
            block_codes = cut(codes, scheme.codes_of(block_slices, of_scales=False))
            scale = cut(scales.detach(), scheme.codes_of(block_slices, of_scales=True))
            first, end = block_slices[scheme.dim]
            values = dequantize_with_kernel(
                block_codes, scale, form=scheme.form, dim=scheme.dim, length=end - first, dtype=dtype
            )
            if values is None:
                values = dequantize_reference(block_codes, scale, scheme, end - first)
            cut(matrix, block_slices).copy_(values)
        return matrix


def quantize(values: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor | None]:
    """(codes, scales) of whole blocks of a matrix, of any float dtype."""
    if scheme.form == "bfloat16":
        return values.to(torch.bfloat16), None
    wide, dim = values.to(torch.float32), scheme.dim
    length = wide.shape[dim]
    scales = torch.stack([block.abs().amax(dim) for block in wide.split(BLOCK, dim)], dim)
    if scheme.form == "int8":
        scales = scales / _LARGEST_INT8
    ratios = wide / _scale_per_value(torch.where(scales == 0, 1.0, scales), dim, length)
    if scheme.form == "int8":
        return ratios.round_().clamp_(-_LARGEST_INT8, _LARGEST_INT8).to(torch.int8), scales
    halves = torch.bucketize(ratios, _middles(ratios.device), out_int32=True).to(torch.uint8)
    if length % 2:
        last = halves.narrow(dim, 0, 1)
        halves = torch.cat((halves, torch.full_like(last, _ZERO)), dim)
    first, second = halves.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return (first << 4) | second, scales


def dequantize_reference(codes: Tensor, scales: Tensor, scheme: QuantScheme, length: int) -> Tensor:
    """Dequantize to float32: `length` values along the blocks' dimension, starting at a block."""
    if scheme.form == "nf4":
        pairs = _pairs(codes.device).index_select(0, codes.reshape(-1).to(torch.int32))
        values = pairs.view(*codes.shape, 2).movedim(-1, scheme.dim + 1).flatten(scheme.dim, scheme.dim + 1)
        values = values.narrow(scheme.dim, 0, length)
    else:
        values = codes.to(torch.float32)
    return values.mul_(_scale_per_value(scales, scheme.dim, length))


def blocks(slices: Slices, dim: int, device_type: str, order: Sequence[int] | None = None) -> Iterator[Slices]:
    """Yield parts of `slices`, whole blocks along `dim`, each of about as many values as are quantized at a time.
    Dimensions are cut in the sequence of `order`."""
    at_once = _AT_ONCE.get(device_type, _AT_ONCE_ELSEWHERE)
    return _split(slices, dim, at_once, order or range(len(slices)))


def _split(slices: Slices, dim: int, at_once: int, order: Sequence[int]) -> Iterator[Slices]:
    sizes = [end - first for first, end in slices]
    if prod(sizes) <= at_once:
        if prod(sizes):
            yield slices
        return
    units = [-(-size // BLOCK) if index == dim else size for index, size in enumerate(sizes)]
    cut_dim = next((candidate for candidate in order if units[candidate] > 1), None)
    if cut_dim is None:
        yield slices
        return
    first, end = slices[cut_dim]
    middle = first + units[cut_dim] // 2 * (BLOCK if cut_dim == dim else 1)
    for part in ((first, middle), (middle, end)):
        yield from _split((*slices[:cut_dim], part, *slices[cut_dim + 1 :]), dim, at_once, order)


def cut(tensor: Tensor, slices: Slices) -> Tensor:
    """View of a tensor at the given slices."""
    for dim, (first, end) in enumerate(slices):
        tensor = tensor.narrow(dim, first, end - first)
    return tensor


def put(block: Tensor, slices: Slices, target: Tensor, origin: Sequence[int]) -> None:
    """Copy `block`, which holds `slices` of a tensor, to `target`, the part of it that starts at `origin`, where they
    overlap."""
    common = tuple(
        (max(low, first), min(end, first + size))
        for (low, end), first, size in zip(slices, origin, target.shape, strict=True)
    )
    if all(low < end for low, end in common):
        source, destination = (
            tuple((low - begin, end - begin) for (low, end), begin in zip(common, begins, strict=True))
            for begins in ([low for low, _ in slices], origin)
        )
        cut(target, destination).copy_(cut(block, source))


def _scale_per_value(scales: Tensor, dim: int, length: int) -> Tensor:
    """Scale of each of `length` values along `dim`."""
    return scales.repeat_interleave(BLOCK, dim).narrow(dim, 0, length)


def _middles(device: torch.device) -> Tensor:
    """`[15]`: float32 midpoints of neighbouring values; at a midpoint, the lower one is chosen."""
    values = torch.tensor(NF4, dtype=torch.float32)
    return accelerator(device).take((values[1:] + values[:-1]) / 2)


def _pairs(device: torch.device) -> Tensor:
    """`[256, 2]`: both values of each byte, upper half first."""
    values, codes = torch.tensor(NF4, dtype=torch.float32), torch.arange(256)
    return accelerator(device).take(torch.stack((values[codes >> 4], values[codes & 15]), dim=1))
