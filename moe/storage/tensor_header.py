"""Headers of safetensors files: names, dtypes, shapes and offsets of tensors. No torch.

A file consists of the header's length in eight bytes, the header (JSON), and the tensors' bytes. The safetensors
library opens only local files, does not expose tensor offsets, and writes all tensors of a file in one call.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import IO, Any

TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
"""torch dtype names by safetensors dtype name."""
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8, "I32": 4, "I16": 2,
    "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
"""Maximum header size, as in the safetensors library."""
_METADATA = "__metadata__"


@dataclass(frozen=True)
class HeaderEntry:
    """Header entry of a tensor in a file."""

    name: str
    dtype: str
    """safetensors name."""
    shape: tuple[int, ...]
    file: str
    begin: int
    """Offset in the file, in bytes."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def read_header(stream: IO[bytes], file: str) -> list[HeaderEntry]:
    """Tensors of a file, in byte order. Raises ValueError, with the tensor, if the file is truncated or not in the
    safetensors format."""
    size = stream.seek(0, os.SEEK_END) or stream.tell()
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(
            f"it has {size:,} bytes but a header length of {length:,}: it is truncated, or not a safetensors file"
        )
    try:
        header = json.loads(stream.read(length))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    tensor_entries = sorted(_entries(header, file, 8 + length), key=lambda entry: entry.begin)
    _check(tensor_entries, 8 + length, size)
    return tensor_entries


def _entries(header: Any, file: str, start: int) -> Iterator[HeaderEntry]:
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    for name, fields in header.items():
        if name == _METADATA:
            continue
        try:
            dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
            are_integers = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"its header has no valid dtype, shape and data_offsets for {name!r}") from None
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise ValueError(f"{name!r} has the dtype {dtype!r}, which is not supported")
        if not are_integers or end - begin != prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{name!r}, {dtype} {shape}, does not fit the bytes from {begin} to {end}")
        yield HeaderEntry(name, dtype, tuple(shape), file, start + begin)


def _check(tensor_entries: list[HeaderEntry], start: int, size: int) -> None:
    offset = start
    for entry in tensor_entries:
        if entry.begin != offset and entry.num_bytes:
            raise ValueError(f"{entry.name!r} does not start where the previous tensor ends")
        offset = max(offset, entry.begin + entry.num_bytes)
        if offset > size:
            raise ValueError(f"it has {size:,} bytes but {entry.name!r} ends at byte {offset:,}: it is truncated")
    if offset != size:
        raise ValueError(f"it has {size - offset:,} bytes after its last tensor")


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Header bytes of a file with these (name, dtype, shape) tensors, in order."""
    offset, fields = 0, dict[str, Any]({_METADATA: {"format": "pt"}})
    for name, dtype, shape in tensors:
        end = offset + prod(shape) * ITEM_BYTES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
