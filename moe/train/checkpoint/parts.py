"""Partial reads of a checkpoint's tensors: byte ranges instead of whole shards.

torch's reader loads whole shards. Its writer makes a `torch.save` archive of each, with the tensor's bytes contiguous
and uncompressed; loading under `FakeTensorMode` gives their offset without reading them.
"""

import io
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from moe.storage.folder import Folder
from moe.train.checkpoint.shards import FolderContents, read_stored

Rectangle = tuple[tuple[int, int], ...]
"""(first, end) for each dimension."""


@dataclass(frozen=True)
class _StoredRun:
    """Stored shard: its place in the full tensor and its bytes in a file."""

    place: Rectangle
    file: str
    begin: int
    strides: tuple[int, ...]


class StoredParts:
    """Tensors of a checkpoint's folder, readable in parts. Raises SpecError if the files are not a checkpoint."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._contents: FolderContents = read_stored(folder)
        self._runs: dict[str, list[_StoredRun]] = {}

    def names(self) -> list[str]:
        return sorted(self._contents.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._contents.tensors[name].size)

    def read(self, name: str, rectangle: Rectangle) -> Tensor:
        """Read a rectangle of a tensor to the CPU."""
        metadata = self._contents.tensors[name]
        tensor = torch.empty([end - first for first, end in rectangle], dtype=metadata.properties.dtype)
        for run in self._runs_of(name):
            common = tuple(
                (max(first, low), min(end, high))
                for (first, end), (low, high) in zip(run.place, rectangle, strict=True)
            )
            if all(first < end for first, end in common):
                part = self._part(run, common, metadata.properties.dtype)
                target = tensor
                for dim, ((first, end), (low, _)) in enumerate(zip(common, rectangle, strict=True)):
                    target = target.narrow(dim, first - low, end - first)
                target.copy_(part)
        return tensor

    def _part(self, run: _StoredRun, common: Rectangle, dtype: torch.dtype) -> Tensor:
        """Read a rectangle of a stored shard as one byte range."""
        starts = [first - low for (first, _), (low, _) in zip(common, run.place, strict=True)]
        sizes = [end - first for first, end in common]
        begin = sum(start * stride for start, stride in zip(starts, run.strides, strict=True))
        span = sum((size - 1) * stride for size, stride in zip(sizes, run.strides, strict=True)) + 1
        first_byte, num_bytes = run.begin + begin * dtype.itemsize, span * dtype.itemsize
        content = self._folder.read(run.file, first_byte, first_byte + num_bytes, max_bytes=num_bytes)
        return torch.frombuffer(bytearray(content), dtype=dtype).as_strided(sizes, run.strides)

    def _runs_of(self, name: str) -> list[_StoredRun]:
        if name not in self._runs:
            self._runs[name] = [self._run(name, chunk) for chunk in self._contents.tensors[name].chunks]
        return self._runs[name]

    def _run(self, name: str, chunk: Any) -> _StoredRun:
        location: _StorageInfo = self._contents.places[MetadataIndex(name, chunk.offsets)]
        with self._folder.open(location.relative_path) as stream, FakeTensorMode():
            archive = io.BufferedReader(_Slice(stream, location.offset, location.length))
            tensor = torch.load(archive, weights_only=True, map_location="cpu")
        offset = tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.dtype.itemsize
        place = tuple((first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
        assert tuple(tensor.shape) == tuple(chunk.sizes), f"{name} has another shape in its checkpoint's metadata"
        return _StoredRun(place, location.relative_path, location.offset + offset, tensor.stride())


class _Slice(io.RawIOBase):
    """File-like view of a byte range of a file."""

    def __init__(self, stream: IO[bytes], begin: int, length: int) -> None:
        self._stream, self._begin, self._length, self._position = stream, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._begin + self._position)
        content = self._stream.read(min(len(buffer), max(0, self._length - self._position)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)
