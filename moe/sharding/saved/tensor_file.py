"""Files of tensors in the safetensors format, written as a stream and read by ranges, on any storage."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import torch
from torch import Tensor

from moe.storage.folder import Folder
from moe.storage.sealing import SealingStream
from moe.storage.tensor_header import ITEM_BYTES, TORCH_NAMES, HeaderEntry, header_bytes, read_header

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of the dtypes that a file may have."""

BLOCK_BYTES = 1 << 25
"""Bytes that are read at a time."""


def write(folder: Folder, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a file, which gets its name once it is complete. Returns (bytes, SHA-256). Tensors are copied one at a
    time."""
    names = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    with folder.create(name) as stream:
        sealing = SealingStream(stream)
        sealing.write(header_bytes((key, NAMES[tensors[key].dtype], tuple(tensors[key].shape)) for key in names))
        for key in names:
            sealing.write(_memory(tensors[key].detach().cpu().contiguous()))
    return sealing.size_bytes, sealing.sha256


def entries(folder: Folder, name: str) -> dict[str, HeaderEntry]:
    """All tensors of a file, by name. Raises ValueError if it does not have this format."""
    with folder.open(name) as stream:
        try:
            return {entry.name: entry for entry in read_header(stream, name)}
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


class TensorFileReader:
    """Reads boxes of the tensors in a folder. The header of each file is read once."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._entries: dict[str, dict[str, HeaderEntry]] = {}
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
            start + size > length for start, size, length in zip(starts, sizes, entry.shape, strict=True)
        ):  # fmt: skip
            raise ValueError(f"{file} lacks the expected shard of {name}")
        with self._folder.open(file) as stream:
            row_bytes = math.prod(sizes[1:]) * ITEM_BYTES[entry.dtype]
            rows = max(1, BLOCK_BYTES // max(1, row_bytes))
            if not sizes:
                yield (), self._box(stream, entry, (), ())
                return
            for offset in range(0, sizes[0], rows):
                num_rows = min(rows, sizes[0] - offset)
                block = self._box(stream, entry, (starts[0] + offset, *starts[1:]), (num_rows, *sizes[1:]))
                yield (slice(offset, offset + num_rows), *(slice(0, size) for size in sizes[1:])), block

    def _box(self, stream: IO[bytes], entry: HeaderEntry, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        box = torch.empty(tuple(sizes), dtype=DTYPES[entry.dtype])
        memory, itemsize = _memory(box), ITEM_BYTES[entry.dtype]
        # dimensions from `inner` on are contiguous in the file
        inner = len(sizes)
        while inner > 0 and (inner == len(sizes) or sizes[inner] == entry.shape[inner]):
            inner -= 1
        strides = [math.prod(entry.shape[dim + 1 :]) * itemsize for dim in range(len(sizes))]
        run_bytes = math.prod(sizes[inner:]) * itemsize
        offset = 0
        for index in itertools.product(*(range(start, start + size) for start, size in zip(
            starts[:inner], sizes[:inner], strict=True
        ))):  # fmt: skip
            place = (*index, *starts[inner:])
            begin = entry.begin + sum(i * stride for i, stride in zip(place, strides, strict=True))
            stream.seek(begin)
            _fill(stream, memory[offset : offset + run_bytes])
            offset += run_bytes
        self.bytes_read += offset
        return box


def _fill(stream: IO[bytes], memory: memoryview) -> None:
    offset = 0
    while offset < len(memory):
        content = stream.read(len(memory) - offset)
        if not content:
            raise ValueError("the file is truncated")
        memory[offset : offset + len(content)] = content
        offset += len(content)


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
