"""Writing of a model to a folder in the Hugging Face format: atomically, shard by shard, from parts on all ranks or in
a checkpoint."""

import json
import os
import secrets
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from moe.interchange import learned_tokens
from moe.interchange.card import model_card
from moe.interchange.catalog import Catalog, catalog
from moe.interchange.config import build_config, family_of
from moe.interchange.copying import fill_folder_tensor, reads_of
from moe.interchange.fitting import EMBEDDING, alternatives, expected_tensors, head_of
from moe.interchange.hub_folder import CONFIG, INDEX, SEALS, SINGLE, HubFolder
from moe.interchange.origin import Origin
from moe.interchange.pieces import ParameterPiece
from moe.interchange.seals import crc_of, seals_text
from moe.interchange.sources import TensorSource
from moe.interchange.tensor_reader import DTYPES, NAMES, TensorReader
from moe.interchange.tokenizer import export_tokenizer
from moe.parallel import json_collectives
from moe.parallel.problems import raise_on_all_ranks
from moe.spec import LanguageModelSpec, Problem, SpecError, spec_error
from moe.spec.parameter import Slices
from moe.storage.folder import Folder
from moe.storage.tensor_header import ITEM_BYTES, header_bytes

MAX_SHARD_BYTES = 4 * 10**9
BLOCK_ELEMENTS = 1 << 23
"""Elements converted at a time."""
_MAX_PENDING_BLOCKS = 2
"""Converted blocks that may be waiting to be written."""
CARD = "README.md"
_TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class TensorToWrite:
    """A Hugging Face tensor, and the parameters that it is built from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    components: tuple[tuple[str, ParameterPiece, int], ...] = ()
    """(our name, piece, expert); if empty, the tensor is copied from the pretrained folder."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def save_folder(
    spec: LanguageModelSpec,
    source: TensorSource,
    target: str | Path,
    *,
    origin: Origin | None = None,
    dtype: torch.dtype = torch.bfloat16,
    files: Mapping[str, bytes] | None = None,
    facts: Mapping[str, str] | None = None,
    max_tokens: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    roots: Sequence[str] | None = None,
) -> None:
    """Write a model in the hub's format to a new folder (a path or fsspec URL), atomically.

    With an `origin`, keeps its config, tokenizer and dtypes, and copies untrained tensors from its folder, which must
    be under the `roots`. Otherwise writes all weights in `dtype`, in the first family that can represent the model,
    with `max_tokens` as the maximum length. `files` are further small files by path, such as a tokenizer; `facts` are
    for the model card. Collective if the source is; rank 0 writes. Raises SpecError on all ranks.
    """
    problems: tuple[Problem, ...] = ()
    try:
        main_dtype = NAMES[dtype] if origin is None else origin.dtype
        config = build_config(spec, None if origin is None else origin.config, _TORCH_DTYPES[main_dtype])
        if origin is None and max_tokens is not None and spec.attention.rope.scaling is None:
            config["max_position_embeddings"] = max_tokens
        origin_catalog = None if origin is None or not origin.untrained_names else _open_origin(origin, roots)
        tensors = list(_tensors(spec, config, origin, origin_catalog, main_dtype))
    except SpecError as error:
        problems = error.problems
    _agree(problems, source)
    small = small_files(config, origin, files or {}, facts or {}, spec)
    write_folder(_shards(tensors, max_shard_bytes), small, source, target, origin_catalog)


def write_folder(
    shards: list[tuple[str, list[TensorToWrite]]],
    small: Mapping[str, bytes],
    source: TensorSource,
    target: str | Path,
    origin_catalog: Catalog | None = None,
) -> None:
    """Write a new folder of these tensors, file by file, and small files by path, atomically. Tensors without
    components are copied from `origin_catalog`. Collective if the source is. Raises SpecError on all ranks.
    """
    problems: tuple[Problem, ...] = ()
    if json_collectives.rank() == 0 or not source.is_collective:
        problems = tuple(_check_target(target))
    _agree(problems, source)
    if source.is_collective and json_collectives.rank() != 0:
        _take_part(source, shards)
        _agree((), source)
        return
    counting_source = _CountingSource(source)
    try:
        with _new(target) as folder:
            for path, content in small.items():
                folder.write(path, content)
            _write_weights(folder, shards, counting_source, origin_catalog)
    except OSError as error:
        problem = Problem("not_writable", "target", str(target), f"cannot be written: {error}",
                          "free some space, or name another folder")  # fmt: skip
        if source.is_collective:  # other ranks wait for the remaining reads
            _take_part(source, shards, counting_source.num_read)
        _agree((problem,), source)
    _agree((), source)


def _agree(problems: Sequence[Problem], source: TensorSource) -> None:
    if source.is_collective:
        raise_on_all_ranks(problems)
    elif problems:
        raise SpecError(problems)


def _open_origin(origin: Origin, roots: Sequence[str] | None) -> Catalog:
    """Catalog of the pretrained folder, from which tensors are copied."""
    try:
        folder_catalog = catalog(HubFolder(origin.url, roots))
    except SpecError as error:
        rule = f"must still be readable: {len(origin.untrained_names)} untrained tensors are copied from it"
        raise SpecError([Problem("not_found", "model.from", origin.url, rule, "restore it"), *error.problems]) from None
    if missing_names := [name for name in origin.untrained_names if name not in folder_catalog.tensors]:
        raise spec_error(
            "changed", "model.from", origin.url, f"no longer holds {missing_names[0]}", "restore its original content"
        )
    return folder_catalog


def _tensors(
    spec: LanguageModelSpec,
    config: Mapping[str, object],
    origin: Origin | None,
    origin_catalog: Catalog | None,
    main_dtype: str,
) -> Iterator[TensorToWrite]:
    """Yield the Hugging Face tensors in the hub's layout, in our order."""
    family = family_of(config, CONFIG)
    folder_tensors: dict[str, tuple[tuple[int, ...], list[tuple[str, ParameterPiece, int]]]] = {}
    float32_names = set()
    for parameter in expected_tensors(spec):
        for piece in alternatives(spec, family, parameter)[0]:
            for expert, name in enumerate(piece.names()):
                folder_tensors.setdefault(name, (piece.tensor_side.shape, []))[1].append(
                    (parameter.name, piece, expert)
                )
                if parameter.is_buffer:
                    float32_names.add(name)
    if origin is not None and origin.keeps_tied and spec.tie_embeddings:
        (embedding_row,), *_ = family.rows(EMBEDDING)
        folder_tensors[head_of(family)] = folder_tensors[embedding_row.tensor_name]
    for name, (shape, components) in folder_tensors.items():
        dtype = ("F32" if name in float32_names else main_dtype) if origin is None else origin.dtype_of(name)
        yield TensorToWrite(name, dtype, shape, tuple(components))
    if origin is None or origin_catalog is None:
        return
    for name in origin.untrained_names:
        yield TensorToWrite(name, origin.dtype_of(name), origin_catalog.tensors[name].shape)


def _shards(tensors: Sequence[TensorToWrite], max_bytes: int) -> list[tuple[str, list[TensorToWrite]]]:
    """Assign tensors to files of at most `max_bytes` each, unless a single tensor is larger."""
    groups: list[list[TensorToWrite]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    if len(groups) == 1:
        return [(SINGLE, groups[0])]
    return [
        (f"model-{number:05}-of-{len(groups):05}.safetensors", group) for number, group in enumerate(groups, start=1)
    ]


def blocks(shape: tuple[int, ...]) -> Iterator[Slices]:
    """Split a tensor into bounded blocks, in byte order."""
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    step = max(1, BLOCK_ELEMENTS // max(1, row))
    other_dims = tuple((0, size) for size in shape[1:])
    for first in range(0, shape[0], step):
        region = (first, min(first + step, shape[0]))
        yield (region, *other_dims)


def _write_weights(
    folder: Folder, shards: list[tuple[str, list[TensorToWrite]]], source: TensorSource, origin_catalog: Catalog | None
) -> None:
    seals: dict[str, int] = {}
    weights = None if origin_catalog is None else TensorReader(origin_catalog.tensors, origin_catalog.files)
    for file, tensors in shards:
        with folder.create(file) as stream, _BlockWriter(stream, seals) as writer:
            stream.write(header_bytes([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]))
            for tensor in tensors:
                seals[tensor.name] = 0
                for region in blocks(tensor.shape):
                    writer.write(tensor.name, _block(tensor, region, source, weights))
    if len(shards) > 1:
        weight_map = {tensor.name: file for file, tensors in shards for tensor in tensors}
        total = sum(tensor.num_bytes for _, tensors in shards for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        folder.write(INDEX, json.dumps(index, indent=2).encode())
    folder.write(SEALS, seals_text(seals))


class _BlockWriter:
    """Writes blocks in order, with checksums, on a separate thread while the next block is converted. The OSError of a
    block is raised by a later write, or at the end."""

    def __init__(self, stream: IO[bytes], seals: dict[str, int]) -> None:
        self._stream, self._seals = stream, seals
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> "_BlockWriter":
        return self

    def write(self, name: str, block: Tensor) -> None:
        self._pending.append(self._thread.submit(self._write_block, name, block))
        while len(self._pending) > _MAX_PENDING_BLOCKS:
            self._pending.popleft().result()

    def _write_block(self, name: str, block: Tensor) -> None:
        self._stream.write(block.flatten().view(torch.uint8).numpy().data)
        self._seals[name] = crc_of(block, self._seals[name])

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(cancel_futures=exception_type is not None)
        if exception_type is None:
            for future in self._pending:
                future.result()


def _block(tensor: TensorToWrite, region: Slices, source: TensorSource, weights: TensorReader | None) -> Tensor:
    if not tensor.components:
        assert weights is not None, "a tensor without components is copied"
        return weights.read(tensor.name, region).to(DTYPES[tensor.dtype]).contiguous()
    block = torch.empty([end - first for first, end in region], dtype=DTYPES[tensor.dtype])
    fill_folder_tensor(block, region, tensor.components, source.read)
    return block


class _CountingSource(TensorSource):
    """Source that counts its reads."""

    def __init__(self, source: TensorSource) -> None:
        self._source, self.num_read = source, 0

    def read(self, name: str, region: Slices, dtype: torch.dtype | None = None) -> Tensor:
        self.num_read += 1
        return self._source.read(name, region, dtype)


def _take_part(source: TensorSource, shards: list[tuple[str, list[TensorToWrite]]], num_read: int = 0) -> None:
    """Take part in the reads of rank 0, in the same order, from number `num_read` on."""
    reads = (
        (*read, DTYPES[tensor.dtype])
        for _, group in shards
        for tensor in group
        for region in (blocks(tensor.shape) if tensor.components else ())
        for read in reads_of(region, tensor.components)
    )
    for name, bounds, dtype in islice(reads, num_read, None):
        source.read(name, bounds, dtype)
    source.finish()


def small_files(
    config: Mapping[str, object],
    origin: Origin | None,
    files: Mapping[str, bytes],
    facts: Mapping[str, str],
    spec: LanguageModelSpec,
) -> dict[str, bytes]:
    small_files = shared_files(origin, files)
    if origin is None and learned_tokens.is_learned(files):
        config = {**config, **learned_tokens.ids()}
    small_files[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    family = family_of(config, CONFIG)
    small_files[CARD] = model_card(spec, facts, origin, family).encode()
    return small_files


def shared_files(origin: Origin | None, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Small files of both model and adapter exports: the tokenizer, and files copied from the pretrained folder."""
    if origin is not None:
        return {**export_tokenizer(origin.files, origin.url), **files}
    return {**files, **(learned_tokens.describe_special_tokens(files) if learned_tokens.is_learned(files) else {})}


def _check_target(target: str | Path) -> Iterator[Problem]:
    """Yield a problem if no new folder can be created at the target."""
    folder = Folder(str(target))
    if not folder.is_local:
        is_taken = bool(folder.names())
    elif (path := Path(folder.path_of(""))).is_symlink():
        yield Problem(
            "not_allowed", "target", str(target), "is a link, which a folder cannot replace", "name a new folder"
        )
        return
    else:
        is_taken = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    if is_taken:
        yield Problem("already_exists", "target", str(target), "already exists", "name a new folder")


@contextmanager
def _new(target: str | Path) -> Iterator[Folder]:
    """New folder that appears, with everything written to it, only if the block succeeds."""
    final = Folder(str(target))
    if not final.is_local:
        try:
            yield final
        except BaseException:
            for name in final.names():
                final.remove(name)
            raise
        return
    path = Path(final.path_of("")).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.parent.resolve() / path.name  # without `..`, below which writes are refused
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    draft.mkdir()
    try:
        yield Folder(str(draft))
        with suppress(FileNotFoundError):
            path.rmdir()  # an empty one
        os.replace(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
