"""Tensors of a run in torch.distributed.checkpoint format, for any number of ranks.

Uses torch's private fsspec writer and the classes that its metadata pickles. torch's `async_save` needs its own
process group for collectives in a background thread. Here all ranks plan once, in the training thread; writing needs
no collectives, and finishing only the write results.
"""

import dataclasses
import io
import pickle
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from moe.activity import doing
from moe.parallel import json_collectives
from moe.spec import Problem, SpecError, spec_error
from moe.storage import confined
from moe.storage.folder import Folder
from moe.storage.sealing import SealingStream
from moe.train.checkpoint.marker import FileSeal, seal
from moe.train.checkpoint.tensor_piece import (
    TensorPiece,
    plan_from_json,
    plan_to_json,
    result_from_json,
    result_to_json,
)


@dataclasses.dataclass(frozen=True)
class ShardWriteResult:
    """One rank's write results: locations of tensors and seals of files."""

    results: list[WriteResult]
    seals: dict[str, FileSeal]

    def to_plain(self) -> dict[str, Any]:
        return {
            "results": [result_to_json(result) for result in self.results],
            "seals": {path: seal.model_dump(mode="json") for path, seal in self.seals.items()},
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "ShardWriteResult":
        """Inverse of `to_plain`."""
        seals = {path: FileSeal.model_validate(seal) for path, seal in plain["seals"].items()}
        return cls([result_from_json(result) for result in plain["results"]], seals)


class ShardWriter:
    """Copies this rank's shards to staging buffers and writes them while training continues.

    `tensors` are the live tensors by name: DTensors or `TensorPiece` if sharded, plain if replicated. One rank writes
    each replica. Creation is collective.
    """

    def __init__(self, tensors: Mapping[str, Tensor | TensorPiece]) -> None:
        self._live = dict(tensors)
        self._staging_buffers: dict[str, Tensor] = {}
        self._planner = _StagedPlanner(self._staging_buffers)
        self._planner.set_up_planner(dict(tensors), is_coordinator=json_collectives.rank() == 0)
        self._plan, self._metadata = self._make_plan()

    def _make_plan(self) -> tuple[SavePlan, Metadata | None]:
        plain_plans, metadata = (json_collectives.gather_json(plan_to_json(self._planner.create_local_plan())), None)
        if plain_plans is not None:
            plans, metadata = self._planner.create_global_plan(list(map(plan_from_json, plain_plans)))
            plain_plans = list(map(plan_to_json, FsspecWriter("memory://").prepare_global_plan(plans)))
        return self._planner.finish_plan(plan_from_json(json_collectives.scatter_json(plain_plans))), metadata

    def stage(self) -> None:
        """Copy the live tensors to the staging buffers, which all saves share; must not run during `write`."""
        for name, live in self._live.items():
            tensor = _local(live)
            if name not in self._staging_buffers:
                self._staging_buffers[name] = torch.empty_like(tensor, device="cpu")
            self._staging_buffers[name].copy_(tensor)

    def write(self, folder: Folder) -> ShardWriteResult:
        """Write this rank's files into the folder. Any thread, no collectives."""
        writer = _SealingWriter(folder)
        results = writer.write_data(self._plan, self._planner).wait()
        return ShardWriteResult(results, writer.sealing.seals)

    def finish(self, folder: Folder, parts: list[ShardWriteResult]) -> dict[str, FileSeal]:
        """Write the metadata and return the seals of all files. On rank 0, after all ranks have written."""
        assert self._metadata is not None, "rank 0 holds the metadata of the plan"
        writer = _SealingWriter(folder)
        writer.finish(dataclasses.replace(self._metadata), [part.results for part in parts])
        return {path: seal for part in parts for path, seal in part.seals.items()} | writer.sealing.seals


def stored_tensors(folder: Folder) -> dict[str, TensorStorageMetadata]:
    """Size, dtype and chunks of the tensors in a folder, by name."""
    return _tensors_in(_PlainReader(folder).read_metadata())


class FolderContents(NamedTuple):
    """Tensors of a checkpoint's folder by name, and the location of each chunk."""

    tensors: dict[str, TensorStorageMetadata]
    places: Mapping[MetadataIndex, Any]


def read_stored(folder: Folder) -> FolderContents:
    """Read the metadata of a checkpoint's folder. Raises SpecError if it is not a checkpoint."""
    metadata = _PlainReader(folder).read_metadata()
    return FolderContents(_tensors_in(metadata), metadata.storage_data)


def load(folder: Folder, tensors: Mapping[str, Tensor | TensorPiece]) -> None:
    """Load `tensors` in place: plain tensors whole, DTensors and `TensorPiece` this rank's shard. No collectives.

    Reads only the requested tensors. Raises SpecError with all tensors that are missing or have another shape, and for
    files that are not a checkpoint, even if sealed.
    """
    reader, planner = _PlainReader(folder), _Planner(tensors)
    metadata = reader.read_metadata()
    stored_tensors = _tensors_in(metadata)
    if problems := list(_misfits(stored_tensors, tensors)):
        raise SpecError(problems)
    with torch.no_grad(), _in_words(folder.url):
        planner.set_up_planner(tensors, metadata, is_coordinator=False)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


class _StagedPlanner(DefaultSavePlanner):
    """Plans from the live tensors, writes the staging buffers."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staging_buffers = tensors

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._staging_buffers[index.fqn]


class _Planner(DefaultLoadPlanner):
    """Load planner that also handles `TensorPiece`, which torch's planner ignores."""

    def __init__(self, tensors: Mapping[str, Tensor | TensorPiece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = dict(tensors)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        plain = {name: tensor for name, tensor in self._tensors.items() if isinstance(tensor, Tensor)}
        super().set_up_planner(plain, metadata, is_coordinator)
        self.state_dict = {name: plain.get(name, tensor) for name, tensor in self._tensors.items()}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor = self.state_dict[index.fqn]
        return tensor.local if isinstance(tensor, TensorPiece) else super().lookup_tensor(index)


class _SealingFileSystem(FileSystem):
    """Folder as a file system for torch's writer, with a seal for each file."""

    def __init__(self, folder: Folder) -> None:
        super().__init__()
        self._folder = folder
        self._drafts: dict[str, io.BytesIO] = {}
        self.seals: dict[str, FileSeal] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb", "torch's writer only writes"
        name = posixpath.basename(path)
        if name.endswith(".tmp"):  # metadata, which torch renames once complete
            yield self._drafts.setdefault(name, io.BytesIO())
            return
        file = doing("checkpoint", f"checkpoint file {self._folder.url_of(name)}")
        with file, self._folder.create(name) as stream:
            sealing = SealingStream(stream)
            yield sealing
        self.seals[name] = FileSeal(size_bytes=sealing.size_bytes, sha256=sealing.sha256)

    def rename(self, path: Any, new_path: Any) -> None:
        content = self._drafts.pop(posixpath.basename(path)).getvalue()
        self._folder.write(name := posixpath.basename(new_path), content)
        self.seals[name] = seal(content)

    def exists(self, path: Any) -> bool:
        """Always False: torch would delete an existing file, but writing replaces it."""
        return False


class _SealingWriter(FsspecWriter):
    def __init__(self, folder: Folder) -> None:
        # torch need not sync: a file in the folder is durable once it has its name.
        super().__init__(folder.url, sync_files=False, per_thread_copy_ahead=0)
        self.fs = self.sealing = _SealingFileSystem(folder)  # type: ignore[assignment]
        self.path = folder.url


_PLAIN = {
    "collections": {"OrderedDict"},
    "torch": {"Size", "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}  # fmt: skip


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles only the classes that torch's checkpoint metadata consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name not in _PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"a checkpoint's metadata cannot contain {module}.{name}")
        return super().find_class(module, name)


def _enum_member(kind: Any, name: str) -> Enum:
    """Enum member as pickled by Python 3.11.0 to 3.11.3, rejecting any other use of `getattr`."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"a checkpoint's metadata cannot contain {name} of {kind!r}")
    return kind[name]


class _ReadFileSystem(FileSystem):
    """Folder as a file system for torch's reader; names in the metadata cannot escape `Folder.open`."""

    def __init__(self, folder: Folder) -> None:
        super().__init__()
        self._folder = folder

    def concat_path(self, path: Any, suffix: str) -> str:
        return suffix

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "rb", "torch's reader only reads"
        with doing("loading", f"checkpoint file {self._folder.url_of(path)}"), self._folder.open(path) as stream:
            yield stream


class _PlainReader(FsspecReader):
    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.url)
        self.fs = _ReadFileSystem(folder)  # type: ignore[assignment]
        self.path = folder.url

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with _in_words(str(self.path)), self.fs.create_stream(self._get_metadata_path(), "rb") as stream:
            metadata: Metadata = _PlainUnpickler(stream).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"a checkpoint's metadata is not a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


@contextmanager
def _in_words(url: str) -> Iterator[None]:
    """Convert errors of reading the checkpoint to SpecError, except storage and memory failures.

    Crafted bytes may raise anything.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, confined.Outside):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        remedy = "use another checkpoint; nothing in this one was executed"
        raise spec_error("corrupt", url, None, f"is not a checkpoint written by a run: {reason}", remedy) from error


def _tensors_in(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    entries = metadata.state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _misfits(
    stored_tensors: Mapping[str, TensorStorageMetadata], tensors: Mapping[str, Tensor | TensorPiece]
) -> Iterator[Problem]:
    remedy = "use the model and optimizer that wrote the checkpoint"
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        if name not in stored_tensors:
            yield Problem("missing", name, None, f"of shape {shape} is missing from the checkpoint", remedy)
        elif stored_tensors[name].size != tensor.shape:
            yield Problem("shape_mismatch", name, list(stored_tensors[name].size),
                          f"must have the shape {shape} of the model", remedy)  # fmt: skip


def _local(tensor: Tensor | TensorPiece) -> Tensor:
    if isinstance(tensor, TensorPiece):
        return tensor.local
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
