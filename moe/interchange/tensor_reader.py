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
from torch.nn.functional import embedding

from moe.data.locations import Location
from moe.interchange.encoded import MXFP4_BLOCK, CatalogTensor
from moe.spec.parameter import Slices
from moe.storage.tensor_header import ITEM_BYTES, TORCH_NAMES, HeaderEntry

DTYPES = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of 4-bit codes (OCP Microscaling Formats, section 5.3.3)."""


def _pairs(values: Sequence[float]) -> Tensor:
    """Values of the two 4-bit codes of each byte, low nibble first: float32 [256, 2]."""
    codes = torch.tensor(values, dtype=torch.float32)
    return torch.stack((codes.repeat(16), codes.repeat_interleave(16)), dim=1)


_PAIRS_OF_E2M1, _PAIRS_OF_INT4 = _pairs(_E2M1), _pairs(range(-8, 8))
_PAIRS_OF_SIGNED_INT4 = _pairs((*range(8), *range(-8, 0)))
"""int4 in two's complement, rather than with an offset of 8."""

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
        match weight.format:
            case None:
                return self.raw(weight.entry, region)
            case "mxfp4":
                return self._mxfp4(weight, region)
            case "fp8":
                return self.raw(weight.entry, region).to(torch.float32) * self._factors(weight, region)
            case "pack-quantized":
                return self._unpack(weight, region, _PAIRS_OF_INT4).mul_(self._factors(weight, region))
            case "nvfp4-pack-quantized" | "modelopt-nvfp4":
                return self._unpack(weight, region, _PAIRS_OF_E2M1).mul_(self._factors(weight, region))
            case "modelopt-int4":
                return self._unpack_rows(weight, region).mul_(self._factors(weight, region))

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

    def _mxfp4(self, weight: CatalogTensor, region: Slices) -> Tensor:
        """Dequantize blocks of 32 values along the inputs (low nibble first): values times 2^(scale - 127). Stored rows
        are outputs; the result is transposed."""
        assert weight.scales is not None
        experts, (low, high), rows = region
        blocks = (low // MXFP4_BLOCK, -(-high // MXFP4_BLOCK))
        packed_values = self.raw(weight.entry, (experts, rows, blocks, (0, MXFP4_BLOCK // 2)))
        exponents = self.raw(weight.scales, (experts, rows, blocks)).to(torch.int32) - 127
        values = embedding(packed_values.int(), _PAIRS_OF_E2M1).flatten(-2)
        decoded_values = torch.ldexp(values, exponents.unsqueeze(-1)).flatten(-2)
        begin = low - blocks[0] * MXFP4_BLOCK
        return decoded_values.narrow(2, begin, high - low).transpose(1, 2)

    def _unpack(self, weight: CatalogTensor, region: Slices, pairs: Tensor) -> Tensor:
        """Values of 4-bit codes, before they are scaled."""
        rows, (low, high) = region
        per_element = 2 * ITEM_BYTES[weight.entry.dtype]
        first = low // per_element
        elements = self.raw(weight.entry, (rows, (first, -(-high // per_element)))).contiguous()
        values = embedding(elements.view(torch.uint8).int(), pairs).flatten(-2)
        return values.narrow(1, low - first * per_element, high - low)

    def _unpack_rows(self, weight: CatalogTensor, region: Slices) -> Tensor:
        """Values of int4 in two's complement, two rows to a byte, before they are scaled."""
        (first, end), columns = region
        codes = self.raw(weight.entry, ((first // 2, -(-end // 2)), columns))
        values = embedding(codes.int(), _PAIRS_OF_SIGNED_INT4).transpose(1, 2).flatten(0, 1)
        return values.narrow(0, first % 2, end - first)

    def _factors(self, weight: CatalogTensor, region: Slices) -> Tensor:
        """Factor of each value in float32: the scale of its block, the tensor's global scale, and the column's."""
        assert weight.scales is not None
        blocks = [(first // size, -(-end // size)) for (first, end), size in zip(region, weight.block, strict=True)]
        factors = self.raw(weight.scales, tuple(blocks)).to(torch.float32)
        if weight.global_scale is not None:
            scale = self.raw(weight.global_scale, tuple((0, size) for size in weight.global_scale.shape))
            factors = factors / scale if weight.format == "nvfp4-pack-quantized" else factors * scale
        for dim, ((first, end), size) in enumerate(zip(region, weight.block, strict=True)):
            begin = blocks[dim][0] * size
            factors = factors.repeat_interleave(size, dim).narrow(dim, first - begin, end - first)
        if weight.column_scales is not None:
            factors = factors * self.raw(weight.column_scales, region[1:]).to(torch.float32)
        return factors


def _tensor(content: memoryview | bytearray, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if not len(content):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(tuple(shape))
