"""Reads rectangles of a folder's tensors, dequantizing quantized ones.

Local files are memory-mapped, so that values are copied once, to their destination, and only the pages needed are read.
For remote files, the rows that contain a rectangle are fetched.
"""

import mmap
import sys
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from moe.data.locations import Location
from moe.interchange.catalog import MXFP4_BLOCK, CatalogTensor
from moe.spec.parameter import Slices
from moe.storage.tensor_header import ITEM_BYTES, TORCH_NAMES, HeaderEntry

DTYPES = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of 4-bit codes (OCP Microscaling Formats, section 5.3.3)."""

assert sys.byteorder == "little", "safetensors files are little-endian"


class TensorReader:
    """Reads tensors by name from a folder's files."""

    def __init__(self, tensors: Mapping[str, CatalogTensor], files: Mapping[str, Location]) -> None:
        self._tensors, self._files = tensors, files
        self._mmaps: dict[str, mmap.mmap] = {}

    def close(self) -> None:
        """Close the files; tensors read from them must no longer be used."""
        self._mmaps.clear()

    def read(self, name: str, region: Slices) -> Tensor:
        """Rectangle of a tensor, read-only; if quantized, dequantized to bfloat16 or wider."""
        weight = self._tensors[name]
        if weight.scales is None:
            return self.raw(weight.entry, region)
        if len(weight.entry.shape) == 4:
            return self._mxfp4(weight, weight.scales, region)
        return self._fp8(weight, weight.scales, region)

    def raw(self, entry: HeaderEntry, region: Slices) -> Tensor:
        """Rectangle of a tensor as stored."""
        first, end = region[0] if region else (0, 1)
        row = prod(entry.shape[1:]) * ITEM_BYTES[entry.dtype]
        begin, size = entry.begin + first * row, max(0, end - first) * row
        shape = (max(0, end - first), *entry.shape[1:]) if region else ()
        rows = _tensor(self._bytes(entry, begin, size), DTYPES[entry.dtype], shape)
        for dim, (low, high) in enumerate(region[1:], 1):
            rows = rows.narrow(dim, low, high - low)
        return rows

    def _bytes(self, entry: HeaderEntry, begin: int, size: int) -> memoryview | bytearray:
        location = self._files[entry.file]
        if location.protocol != "file":
            with location.raw() as stream:
                stream.seek(begin)
                return bytearray(stream.read(size))
        if entry.file not in self._mmaps:
            with location.raw() as stream:
                # Copy-on-write, so that torch accepts it as writable; nothing writes to it.
                self._mmaps[entry.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        view = memoryview(self._mmaps[entry.file])[begin : begin + size]
        is_aligned = begin % ITEM_BYTES[entry.dtype] == 0
        return view if is_aligned else bytearray(view)

    def _mxfp4(self, weight: CatalogTensor, scales: HeaderEntry, region: Slices) -> Tensor:
        """Dequantize blocks of 32 values along the inputs (low nibble first): values times 2^(scale - 127). Stored rows
        are outputs; the result is transposed."""
        experts, (low, high), rows = region
        blocks = (low // MXFP4_BLOCK, -(-high // MXFP4_BLOCK))
        packed_values = self.raw(weight.entry, (experts, rows, blocks, (0, MXFP4_BLOCK // 2)))
        exponents = self.raw(scales, (experts, rows, blocks)).to(torch.int32) - 127
        values = torch.tensor(_E2M1, dtype=torch.float32)
        halves = torch.stack((values[(packed_values & 15).long()], values[(packed_values >> 4).long()]), dim=-1)
        decoded_values = torch.ldexp(halves.flatten(-2), exponents.unsqueeze(-1)).flatten(-2)
        begin = low - blocks[0] * MXFP4_BLOCK
        return decoded_values.narrow(2, begin, high - low).transpose(1, 2)

    def _fp8(self, weight: CatalogTensor, scales: HeaderEntry, region: Slices) -> Tensor:
        """Dequantize: values times the scale of their block."""
        blocks = [(first // size, -(-end // size)) for (first, end), size in zip(region, weight.block, strict=True)]
        factors = self.raw(scales, tuple(blocks)).to(torch.float32)
        for dim, ((first, end), size) in enumerate(zip(region, weight.block, strict=True)):
            begin = blocks[dim][0] * size
            factors = factors.repeat_interleave(size, dim).narrow(dim, first - begin, end - first)
        return self.raw(weight.entry, region).to(torch.float32) * factors


def _tensor(content: memoryview | bytearray, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if not len(content):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(tuple(shape))
