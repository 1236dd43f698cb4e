"""Checksums of exported weights, which identify the file and tensor of a flipped bit. The safetensors format has none,
so other folders are checked only by headers and for finite values."""

import json
import zlib
from typing import Any

import torch
from torch import Tensor

from moe.interchange.catalog import Catalog
from moe.interchange.hub_folder import MAX_INDEX_BYTES, SEALS
from moe.interchange.tensor_reader import TensorReader
from moe.spec import Problem
from moe.storage.tensor_header import HeaderEntry

VERSION = 1
_BLOCK_BYTES = 1 << 24


def crc_of(block: Tensor, initial_crc: int = 0) -> int:
    """CRC-32 of a tensor's bytes, continued from `initial_crc`."""
    flat = block.contiguous().flatten()
    return zlib.crc32(flat.view(torch.uint8).numpy().data, initial_crc) if flat.numel() else initial_crc


def seals_text(crc_by_name: dict[str, int]) -> bytes:
    """Content of the checksum file."""
    record: dict[str, Any] = {"version": VERSION, "crc32": {name: f"{crc:08x}" for name, crc in crc_by_name.items()}}
    return (json.dumps(record, indent=1) + "\n").encode()


def faults(folder_catalog: Catalog, reader: TensorReader, rank: int, num_ranks: int) -> list[Problem]:
    """Problems for tensors, of this rank's share, whose checksum differs; empty if the folder has no checksums."""
    if not folder_catalog.folder.has(SEALS):
        return []
    record = folder_catalog.folder.read_json(SEALS, MAX_INDEX_BYTES)
    if record.get("version") != VERSION or not isinstance(record.get("crc32"), dict):
        return [Problem("wrong_version", folder_catalog.folder.path(SEALS), record.get("version"),
                        f"must have version {VERSION}",
                        "remove it to skip the check")] if rank == 0 else []  # fmt: skip
    crcs, problems = record["crc32"], []
    for name, entry in _share(folder_catalog, rank, num_ranks):
        expected_crc, offset, crc = crcs.get(name), 0, 0
        if expected_crc is None:
            continue
        while offset < entry.num_bytes:
            end = min(entry.num_bytes, offset + _BLOCK_BYTES)
            crc = crc_of(
                reader.raw(HeaderEntry(name, "U8", (entry.num_bytes,), entry.file, entry.begin), ((offset, end),)), crc
            )
            offset = end
        if f"{crc:08x}" != expected_crc:
            problems.append(folder_catalog.problem("corrupt", name,
                                          "has changed since it was written: its checksum differs",
                                          f"write it again; or, if you changed it, remove {SEALS}",
                                          f"{crc:08x}"))  # fmt: skip
    return problems


def _share(catalog: Catalog, rank: int, num_ranks: int) -> list[tuple[str, HeaderEntry]]:
    """Tensors for one of `num_ranks` ranks to check, balanced by bytes."""
    sizes, share = [0] * num_ranks, []
    entries = {tensor.entry.name: (name, tensor.entry) for name, tensor in catalog.tensors.items()}
    for name, entry in sorted(entries.values(), key=lambda named_entry: -named_entry[1].num_bytes):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += entry.num_bytes
        if smallest == rank:
            share.append((name, entry))
    return share
