"""Loading of an applied module from a checkpoint that was saved with any plan: each rank reads its own parts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from moe.parallel import json_collectives
from moe.parallel.problems import ask_rank0
from moe.sharding.applied.applied import Applied, LocalShard
from moe.sharding.applied.dtensors import local
from moe.sharding.saved import index as indices
from moe.sharding.saved.index import MODEL, Index, SavedTensor
from moe.sharding.saved.optimizer_state import optimizer_problems, restore
from moe.sharding.saved.tensor_file import DTYPES, TensorFileReader
from moe.spec import Problem, SpecError, spec_error
from moe.storage import sealing
from moe.storage.folder import Folder


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A complete checkpoint, whose index has been read and whose files have been checked."""

    folder: Folder
    index: Index
    reader: TensorFileReader

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """The checkpoint of a folder. All ranks call it; each checks a share of the files. Raises SpecError, on all
        ranks, for one that is incomplete or altered."""
        checkpoint_folder = Folder(str(folder))

        index = Index.from_json(ask_rank0(lambda: indices.read(checkpoint_folder).to_json()))
        local_files = sorted(index.files)[json_collectives.rank() :: json_collectives.world_size()]
        results = [
            sealing.fault(checkpoint_folder, file, index.files[file].size_bytes, index.files[file].sha256)
            for file in local_files
        ]
        local_faults = [(fault, isinstance(fault, sealing.UnreadableStorage)) for fault in results if fault]
        problems = [
            _file_problem(checkpoint_folder, fault, is_unreadable)
            for rank_faults in json_collectives.all_gather_json(local_faults)
            for fault, is_unreadable in rank_faults
        ]
        if problems:
            raise SpecError(problems)
        return cls(checkpoint_folder, index, TensorFileReader(checkpoint_folder))

    def find(self, names: Sequence[str]) -> tuple[str, SavedTensor] | None:
        """(path in the checkpoint, saved tensor) of the module's tensor that has these names; None if it is missing."""
        paths = [f"{MODEL}{self.index.tied.get(name, name)}" for name in names]
        return next(((path, self.index.tensors[path]) for path in paths if path in self.index.tensors), None)

    def gives(self, names: Sequence[str], is_persistent: bool) -> bool:
        """Whether the values of the module's tensor that has these names come from the checkpoint. Persistent tensors'
        must."""
        return is_persistent or self.find(names) is not None

    def problems(self, applied: Applied) -> Iterator[Problem]:
        """Problems of a checkpoint that is not of this module: tensors that are missing, have another shape, or are not
        in the module."""
        remedy = "use the module of the checkpoint"
        shards, persistent = applied.shards(), _persistent(applied)
        module_paths = {f"{MODEL}{self.index.tied.get(name, name)}" for names in applied.names() for name in names}
        for names in applied.names():
            name, shard = names[0], shards[names[0]]
            if (match := self.find(names)) is None:
                if name in persistent:
                    yield Problem(
                        "missing", name, None, f"of shape {list(shard.shape)} is missing from the checkpoint", remedy
                    )
            elif match[1].shape != shard.shape:
                rule = f"must have the module's shape {list(shard.shape)}"
                yield Problem("shape_mismatch", name, list(match[1].shape), rule, remedy)
            elif DTYPES[match[1].dtype].is_floating_point != shard.part.dtype.is_floating_point:
                yield Problem(
                    "dtype_mismatch", name, match[1].dtype, f"cannot be converted to {shard.part.dtype}", remedy
                )
        for path, saved_tensor in self.index.tensors.items():
            if path.startswith(MODEL) and path not in module_paths:
                rule = "is in the checkpoint but not in the module"
                yield Problem("unknown_key", path.removeprefix(MODEL), list(saved_tensor.shape), rule, remedy)

    def fill(self, applied: Applied) -> None:
        """Copy values into the module's parts in place, and set its seed and step."""
        shards = applied.shards()
        for names in applied.names():
            if (match := self.find(names)) is not None:
                self._read(match[1], match[0], shards[names[0]])
        if (draws := self.index.draws) is not None:
            applied.draws.seed, applied.draws.step = draws["seed"], draws["step"]

    def restore(self, applied: Applied, optimizer: Optimizer) -> None:
        def read(saved_tensor: SavedTensor, path: str, name: str | None) -> Tensor:
            if name is None:
                tensor = torch.empty(saved_tensor.shape, dtype=DTYPES[saved_tensor.dtype])
                self._read(
                    saved_tensor, path, LocalShard(saved_tensor.shape, (0,) * len(saved_tensor.shape), tensor, True)
                )
                return tensor
            shard = torch.empty_like(local(applied.get_parameter(name).detach()), dtype=DTYPES[saved_tensor.dtype])
            tensor = applied.sharded_like(name, shard)
            self._read(saved_tensor, path, applied.shard_of(name, tensor))
            return tensor

        restore(applied, optimizer, self.index, read)

    def _read(self, saved_tensor: SavedTensor, path: str, shard: LocalShard) -> None:
        """Copy a saved tensor into a shard, from all pieces that overlap with it."""
        num_read = 0
        for piece in saved_tensor.pieces:
            first = [max(*offsets) for offsets in zip(piece.offsets, shard.offsets, strict=True)]
            last = [
                min(offset + size, shard_offset + shard_size)
                for offset, size, shard_offset, shard_size in zip(
                    piece.offsets, piece.sizes, shard.offsets, shard.part.shape, strict=True
                )
            ]
            sizes = [end - begin for begin, end in zip(first, last, strict=True)]
            if min(sizes, default=1) <= 0:
                continue
            target = shard.part[
                tuple(slice(a - b, a - b + n) for a, b, n in zip(first, shard.offsets, sizes, strict=True))
            ]
            starts = [a - b for a, b in zip(first, piece.offsets, strict=True)]
            try:
                for place, values in self.reader.read(piece.file, piece.name, starts, sizes):
                    target[place].copy_(values)
            except ValueError as error:
                raise self._corrupt_error(f"{error}") from None
            num_read += math.prod(sizes)
        if num_read != shard.part.numel():
            raise self._corrupt_error(f"lacks elements of {path}")

    def _corrupt_error(self, rule: str) -> SpecError:
        return spec_error("corrupt", "checkpoint", self.folder.url, rule, "use another checkpoint")


def _file_problem(folder: Folder, fault: str, is_unreadable: bool) -> Problem:
    if is_unreadable:
        return Problem("unreadable", "checkpoint", folder.url, fault, "retry when the storage is readable")
    return Problem(
        "corrupt", "checkpoint", folder.url, fault, "use another checkpoint; this one is incomplete or modified"
    )


@torch.no_grad()
def load(applied: Applied, folder: str | Path, optimizer: Optimizer | None = None) -> Any:
    """Load the module, and the optimizer, from a checkpoint that was saved with any plan, mesh and number of ranks.
    Returns the `extra` that was saved. All ranks call it; each reads only the bytes of its own parts, and checks a
    share of the files.

    A folder may also contain safetensors files of whole tensors with the module's names, without optimizer state.

    Raises SpecError for a checkpoint that is incomplete or altered, and for tensors that are missing, have another
    shape, or are not in the module; nothing is changed then.
    """
    checkpoint = Checkpoint.open(folder)
    problems = list(checkpoint.problems(applied))
    if optimizer is not None:
        problems += optimizer_problems(applied, optimizer, checkpoint.index)
    if problems:
        raise SpecError(problems)
    checkpoint.fill(applied)
    if optimizer is not None:
        checkpoint.restore(applied, optimizer)
    return checkpoint.index.extra


def _persistent(applied_module: Applied) -> set[str]:
    """Names of parameters and of persistent buffers."""
    persistent_names = {name for name, _ in applied_module.named_parameters(remove_duplicate=False)}
    for path, module in applied_module.named_modules():
        names = set(module._buffers) - module._non_persistent_buffers_set
        persistent_names |= {f"{path}.{name}" if path else name for name in names}
    return persistent_names
