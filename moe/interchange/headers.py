"""Headers of safetensors files: which tensors they hold, and where. Read before any weight is. No torch.

A file is eight bytes of the header's length, the header (JSON), and the tensors' bytes.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from moe.data.locations import Location
from moe.spec import Problem, ProblemCode, SpecError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8, "I32": 4, "I16": 2,
    "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
"""Largest header, as in the safetensors library."""
METADATA = "__metadata__"
_AGAIN = "get the file again from where the model came from"


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor as it lies in a file."""

    name: str
    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]
    file: str
    begin: int
    """Its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def entries(file: str, location: Location, place: str) -> list[HeaderEntry]:
    """Tensors of a file, in the order of its bytes. Raises SpecError, with file and tensor, for a file that is cut off,
    unreadable, or no safetensors file."""
    try:
        with location.raw() as stream:
            size = stream.seek(0, os.SEEK_END) or stream.tell()
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(
                    f"its header would have {length:,} bytes, and it has {size:,} in all: it is cut off, or no "
                    "safetensors file"
                )
            header = json.loads(stream.read(length))
        tensor_entries = sorted(_entries(header, file, 8 + length), key=lambda entry: entry.begin)
        _check(tensor_entries, 8 + length, size)
    except (ValueError, RecursionError, OSError) as error:
        code: ProblemCode = "unreadable" if isinstance(error, OSError) else "corrupt"
        raise SpecError(
            Problem(code, place, str(location), f"cannot be read as {file}: {error}", _AGAIN)
        ) from None
    return tensor_entries


def _entries(header: Any, file: str, start: int) -> Iterator[HeaderEntry]:
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    for name, fields in header.items():
        if name == METADATA:
            continue
        try:
            dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
            whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"its header does not say where {name!r} lies") from None
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise ValueError(f"{name!r} has the dtype {dtype!r}, which is not known")
        if not whole or end - begin != prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{name!r}, {dtype} {shape}, cannot be the bytes from {begin} to {end}")
        yield HeaderEntry(name, dtype, tuple(shape), file, start + begin)


def _check(tensor_entries: list[HeaderEntry], start: int, size: int) -> None:
    at = start
    for entry in tensor_entries:
        if entry.begin != at and entry.num_bytes:
            raise ValueError(f"{entry.name!r} does not begin where the tensor before it ends")
        at = max(at, entry.begin + entry.num_bytes)
        if at > size:
            raise ValueError(f"it has {size:,} bytes and ends within {entry.name!r}, whose last would be the "
                             f"{at:,}th: it is cut off")  # fmt: skip
    if at != size:
        raise ValueError(f"it has {size - at:,} bytes beyond its last tensor")


def header_bytes(tensors: list[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The beginning of a file with these (name, dtype, shape), in order."""
    at, header = 0, {METADATA: {"format": "pt"}}
    fields: dict[str, Any] = dict(header)
    for name, dtype, shape in tensors:
        end = at + prod(shape) * ITEM_BYTES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
