"""Reads `.wandb` files, which W&B writes beside each run and `wandb sync` uploads: a log in LevelDB's format.

After a header of seven bytes (`:W&B`, the magic number 0xBEE1 and the version), the file is a sequence of blocks of 32
KiB. A block has fragments, each with a header of a checksum (4 bytes), its length (2) and its kind (1); a record is one
fragment or several. The remainder of a block that has no room for a header is zero.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER = b":W&B\xe1\xbe\x00"
BLOCK_BYTES = 32 * 1024
FRAGMENT_HEADER_BYTES = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_records(path: Path) -> Iterator[Any]:
    """Records (`wandb_internal_pb2.Record`) up to the end, or up to what a killed process left incomplete."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made at import

    for data in _frames(path.read_bytes()):
        record = Record()
        try:
            record.ParseFromString(data)
        except DecodeError:
            return
        yield record


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of the run's history, with their `_step`."""
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                name = "/".join(item.nested_key) or item.key
                row[name] = json.loads(item.value_json)
            yield row


def last_step(path: Path) -> int | None:
    """Highest step of the history; None without any."""
    return max((int(row["_step"]) for row in read_history(path) if "_step" in row), default=None)


def _frames(data: bytes) -> Iterator[bytes]:
    offset, parts = len(HEADER), bytearray()
    while offset + FRAGMENT_HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - offset % BLOCK_BYTES
        if left < FRAGMENT_HEADER_BYTES:
            offset += left
            continue
        length = int.from_bytes(data[offset + 4 : offset + 6], "little")
        kind = data[offset + 6]
        fragment = data[offset + FRAGMENT_HEADER_BYTES : offset + FRAGMENT_HEADER_BYTES + length]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(fragment) < length:
            return
        offset += FRAGMENT_HEADER_BYTES + length
        parts = bytearray(fragment) if kind in (FULL, FIRST) else parts + fragment
        if kind in (FULL, LAST):
            yield bytes(parts)
