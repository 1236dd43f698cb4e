"""Saving of an applied module: each rank writes the parts whose first copy it has; then the index is written."""

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from moe.parallel import json_collectives
from moe.parallel.problems import raise_on_all_ranks
from moe.sharding.applied.applied import Applied, LocalShard
from moe.sharding.saved import index as indices
from moe.sharding.saved import tensor_file
from moe.sharding.saved.index import MODEL, Index, OptimizerState, SavedPiece, SavedTensor, Seal
from moe.sharding.saved.optimizer_state import plain_state
from moe.spec import Problem, SpecError
from moe.storage.folder import Folder


class SaveError(RuntimeError):
    """A checkpoint could not be written. The previous one in its folder is unchanged."""


@torch.no_grad()
def save(applied: Applied, folder: str | Path, optimizer: Optimizer | None = None, *, extra: Any = None) -> None:
    """Write the module's parameters and buffers, the seed and step of its random numbers, the optimizer's state, and
    `extra`, a JSON value, into a folder that all ranks see (a path, or a URL that fsspec supports). All ranks call it.
    When it returns, the checkpoint is complete and durable, and has replaced the previous one.

    Raises, on all ranks, SpecError for values that cannot be saved, and SaveError if any rank cannot write.
    """
    checkpoint_folder, name = (Folder(str(folder)), json_collectives.broadcast_from_rank0(lambda: secrets.token_hex(4)))
    shards, state = _shards_of(applied, optimizer, extra)
    file = indices.piece_file(json_collectives.rank(), json_collectives.world_size(), name)
    local_shards = {
        path: shard for path, shard in shards.items() if shard.is_first and (shard.part.numel() or not shard.shape)
    }

    def write_shards() -> list[Any]:
        return (
            list(tensor_file.write(checkpoint_folder, file, {path: shard.part for path, shard in local_shards.items()}))
            if local_shards
            else []
        )

    seal = _call_on_all_ranks(write_shards)
    rank_entries = json_collectives.gather_json(
        {
            "file": file,
            "seal": seal,
            "pieces": {path: [shard.offsets, shard.part.shape] for path, shard in local_shards.items()},
        }
    )

    def finish() -> None:
        if rank_entries is None:
            return
        index = Index(
            _saved_tensors(shards, rank_entries),
            {entry["file"]: Seal(*entry["seal"]) for entry in rank_entries if entry["seal"]},
            {alias: first for first, *aliases in applied.names() for alias in aliases},
            {"seed": applied.draws.seed, "step": applied.draws.step},
            state,
            extra,
        )
        sizes = checkpoint_folder.sizes()
        for file_name, file_seal in index.files.items():
            if sizes.get(file_name) != file_seal.size_bytes:
                raise OSError(
                    f"{file_name} differs from what its rank wrote: all ranks must share {checkpoint_folder.url}"
                )
        indices.write(checkpoint_folder, index)
        for file_name in checkpoint_folder.names():
            if indices.is_piece_file(file_name) and file_name not in index.files:
                checkpoint_folder.remove(file_name)

    _call_on_all_ranks(finish)


def _shards_of(
    applied_module: Applied, optimizer: Optimizer | None, extra: Any
) -> tuple[dict[str, LocalShard], OptimizerState | None]:
    """This rank's shards by their names in the checkpoint. Raises SpecError, on all ranks."""
    every_shard = applied_module.shards()
    shards = {f"{MODEL}{first}": every_shard[first] for first, *_ in applied_module.names()}
    problems: list[Problem] = []
    state = None

    def add(path: str, name: str | None, tensor: Tensor) -> None:
        shards[path] = (
            applied_module.shard_of(name, tensor) if name is not None
            else LocalShard(tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach(), json_collectives.rank() == 0)
        )  # fmt: skip

    if optimizer is not None:
        try:
            state = plain_state(applied_module, optimizer, add)
        except SpecError as error:
            problems += error.problems
    problems += [
        Problem(
            "dtype_mismatch",
            path,
            str(shard.part.dtype),
            "is a dtype that safetensors does not support",
            "use another dtype",
        )
        for path, shard in shards.items()
        if shard.part.dtype not in tensor_file.NAMES
    ]
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        problems.append(Problem("wrong_type", "extra", None, f"must be a JSON value ({error})", "use plain values"))
    raise_on_all_ranks(problems)
    return shards, state


def _saved_tensors(shards: dict[str, LocalShard], rank_entries: list[dict[str, Any]]) -> dict[str, SavedTensor]:
    pieces: dict[str, list[SavedPiece]] = {path: [] for path in shards}
    for entry in rank_entries:
        for path, (offsets, sizes) in entry["pieces"].items():
            pieces[path].append(SavedPiece(entry["file"], path, tuple(offsets), tuple(sizes)))
    return {
        path: SavedTensor(shard.shape, tensor_file.NAMES[shard.part.dtype], tuple(pieces[path]))
        for path, shard in shards.items()
    }


def _call_on_all_ranks(function: Callable[[], Any]) -> Any:
    """Call a function on all ranks, and return its result. Raises SaveError on all ranks if it fails on one."""
    result, failure = None, None
    try:
        result = function()
    except OSError as error:
        failure = f"{type(error).__name__}: {error}"
    faults = [
        f"rank {rank}: {rank_failure}"
        for rank, rank_failure in enumerate(json_collectives.all_gather_json(failure))
        if rank_failure
    ]
    if faults:
        raise SaveError(f"saving the checkpoint failed ({'; '.join(faults)})")
    return result
