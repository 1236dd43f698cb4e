"""An applied module saved: each rank writes the parts that it is the first to have, then the index says that all is
there."""

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from moe.parallel import together
from moe.sharding.applied.applied import Applied, Shard
from moe.sharding.saved import index as indices
from moe.sharding.saved import tensor_file
from moe.sharding.saved.index import MODEL, Index, OptimizerState, Piece, SavedTensor, Seal
from moe.sharding.saved.optimizer_state import plain_state
from moe.spec import Problem, SpecError
from moe.storage.folder import Folder


class SaveError(RuntimeError):
    """A checkpoint could not be written; what was in its folder before is as it was."""


@torch.no_grad()
def save(
    applied: Applied, folder: str | Path, optimizer: Optimizer | None = None, *, extra: Any = None
) -> None:
    """Write the module's parameters and buffers, the seed and step of its random numbers, the optimizer's state and
    `extra`, a value as JSON has it, into a folder that all ranks see (a path, or a URL that fsspec knows). All ranks
    call it; when it returns, the checkpoint is whole and durable, and replaces what the folder had before.

    Raises SpecError for what cannot be saved, SaveError where some rank cannot write, on all ranks.
    """
    there, name = Folder(str(folder)), together.from_first(lambda: secrets.token_hex(4))
    shards, state = _shards_of(applied, optimizer, extra)
    file = indices.piece_file(together.rank(), together.world_size(), name)
    mine = {
        path: each for path, each in shards.items() if each.is_first and (each.part.numel() or not each.shape)
    }

    def written() -> list[Any]:
        return (
            list(tensor_file.write(there, file, {path: each.part for path, each in mine.items()}))
            if mine
            else []
        )

    seal = _everywhere(written)
    told = together.gathered(
        {
            "file": file,
            "seal": seal,
            "pieces": {path: [each.offsets, each.part.shape] for path, each in mine.items()},
        }
    )

    def finished() -> None:
        if told is None:
            return
        index = Index(
            _stored(shards, told),
            {each["file"]: Seal(*each["seal"]) for each in told if each["seal"]},
            {other: first for first, *others in applied.names() for other in others},
            {"seed": applied.draws.seed, "step": applied.draws.step},
            state,
            extra,
        )
        seen = there.sizes()
        for each, sealed in index.files.items():
            if seen.get(each) != sealed.size_bytes:
                raise OSError(
                    f"{each} is not seen here as its rank has written it: all ranks must see {there.url}"
                )
        indices.write(there, index)
        for each in there.names():
            if indices.is_piece_file(each) and each not in index.files:
                there.remove(each)

    _everywhere(finished)


def _shards_of(
    applied: Applied, optimizer: Optimizer | None, extra: Any
) -> tuple[dict[str, Shard], OptimizerState | None]:
    """This rank's shards by their names in the checkpoint. Raises SpecError, on all ranks."""
    every_shard = applied.shards()
    shards = {f"{MODEL}{first}": every_shard[first] for first, *_ in applied.names()}
    problems: list[Problem] = []
    state = None

    def add(path: str, name: str | None, tensor: Tensor) -> None:
        shards[path] = (
            applied.shard_of(name, tensor) if name is not None
            else Shard(tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach(), together.rank() == 0)
        )  # fmt: skip

    if optimizer is not None:
        try:
            state = plain_state(applied, optimizer, add)
        except SpecError as error:
            problems += error.problems
    problems += [
        Problem(
            "dtype_mismatch",
            path,
            str(each.part.dtype),
            "is of a dtype that safetensors do not have",
            "use another dtype",
        )
        for path, each in shards.items()
        if each.part.dtype not in tensor_file.NAMES
    ]
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        problems.append(
            Problem(
                "wrong_type", "extra", None, f"must be a value as JSON has it ({error})", "use plain values"
            )
        )
    every = [
        Problem(**each)
        for told in together.all_gathered([each.to_dict() for each in problems])
        for each in told
    ]
    if every:
        raise SpecError(list({str(each): each for each in every}.values()))
    return shards, state


def _stored(shards: dict[str, Shard], told: list[dict[str, Any]]) -> dict[str, SavedTensor]:
    pieces: dict[str, list[Piece]] = {path: [] for path in shards}
    for each in told:
        for path, (offsets, sizes) in each["pieces"].items():
            pieces[path].append(Piece(each["file"], path, tuple(offsets), tuple(sizes)))
    return {
        path: SavedTensor(each.shape, tensor_file.NAMES[each.part.dtype], tuple(pieces[path]))
        for path, each in shards.items()
    }


def _everywhere(do: Callable[[], Any]) -> Any:
    """What it gives. Raises SaveError on all ranks where it fails on one."""
    found, said = None, None
    try:
        found = do()
    except OSError as error:
        said = f"{type(error).__name__}: {error}"
    faults = [f"rank {rank}: {each}" for rank, each in enumerate(together.all_gathered(said)) if each]
    if faults:
        raise SaveError(f"the checkpoint was not saved ({'; '.join(faults)})")
    return found
