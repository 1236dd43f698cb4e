"""Files of tensors in the safetensors format, written as a stream and read by ranges, on any storage.

The safetensors library takes all tensors of a file as bytes at once, and reads only from disks. The format is 8 bytes
with the length of the header, the header in JSON, and the tensors one after the other.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from moe.storage.folder import Folder
from moe.storage.sealing import SealingStream

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""Names of the dtypes that a file may have."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}

BLOCK_BYTES = 1 << 25
"""Bytes that are read at a time."""
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class FileEntry:
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first_byte: int
    """Offset from the beginning of the file."""


def write(folder: Folder, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a file, which gets its name once it is complete. Returns (bytes, SHA-256). Tensors are copied one at a
    time."""
    names = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in names:
        tensor = tensors[key]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with folder.create(name) as stream:
        sealing = SealingStream(stream)
        sealing.write(len(text).to_bytes(8, "little") + text)
        for key in names:
            sealing.write(_memory(tensors[key].detach().cpu().contiguous()))
    return sealing.size_bytes, sealing.sha256


def entries(folder: Folder, name: str) -> dict[str, FileEntry]:
    """All tensors of a file, by name. Raises ValueError if it does not have this format."""
    with folder.open(name) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{name} has no header of safetensors")
        text = stream.read(length)
    try:
        header = json.loads(text)
        tensors = {}
        for key, fields in header.items():
            if key == "__metadata__":
                continue
            dtype, shape = DTYPES[fields["dtype"]], tuple(map(int, fields["shape"]))
            begin, end = map(int, fields["data_offsets"])
            if min(shape, default=0) < 0 or begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(key)
            tensors[key] = FileEntry(dtype, shape, 8 + length + begin)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{name} has a header that is none of safetensors") from None
    return tensors


class TensorFileReader:
    """Reads boxes of the tensors in a folder. The header of each file is read once."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._entries: dict[str, dict[str, FileEntry]] = {}
        self.bytes_read = 0
        """Bytes of tensors that were read so far."""

    def read(
        self, file: str, name: str, starts: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """(place within the box, values) of blocks that together are a box of a tensor; no other bytes are read.
        Raises ValueError for a file or a tensor that is not as it should be, OSError if it cannot be read."""
        if file not in self._entries:
            self._entries[file] = entries(self._folder, file)
        entry = self._entries[file].get(name)
        if entry is None or len(entry.shape) != len(sizes) or any(
            start + size > whole for start, size, whole in zip(starts, sizes, entry.shape, strict=True)
        ):  # fmt: skip
            raise ValueError(f"{file} does not have the part of {name} that it should have")
        with self._folder.open(file) as stream:
            row_bytes = math.prod(sizes[1:]) * entry.dtype.itemsize
            rows = max(1, BLOCK_BYTES // max(1, row_bytes))
            if not sizes:
                yield (), self._box(stream, entry, (), ())
                return
            for at in range(0, sizes[0], rows):
                num_rows = min(rows, sizes[0] - at)
                block = self._box(stream, entry, (starts[0] + at, *starts[1:]), (num_rows, *sizes[1:]))
                yield (slice(at, at + num_rows), *(slice(0, size) for size in sizes[1:])), block

    def _box(
        self, stream: IO[bytes], entry: FileEntry, starts: Sequence[int], sizes: Sequence[int]
    ) -> Tensor:
        box = torch.empty(tuple(sizes), dtype=entry.dtype)
        memory, itemsize = _memory(box), entry.dtype.itemsize
        # dimensions from `inner` on are contiguous in the file
        inner = len(sizes)
        while inner > 0 and (inner == len(sizes) or sizes[inner] == entry.shape[inner]):
            inner -= 1
        strides = [math.prod(entry.shape[dim + 1 :]) * itemsize for dim in range(len(sizes))]
        run = math.prod(sizes[inner:]) * itemsize
        at = 0
        for index in itertools.product(*(range(start, start + size) for start, size in zip(
            starts[:inner], sizes[:inner], strict=True
        ))):  # fmt: skip
            place = (*index, *starts[inner:])
            first = entry.first_byte + sum(i * stride for i, stride in zip(place, strides, strict=True))
            stream.seek(first)
            _fill(stream, memory[at : at + run])
            at += run
        self.bytes_read += at
        return box


def _fill(stream: IO[bytes], memory: memoryview) -> None:
    at = 0
    while at < len(memory):
        content = stream.read(len(memory) - at)
        if not content:
            raise ValueError("the file ends before its tensors do")
        memory[at : at + len(content)] = content
        at += len(content)


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
