"""The same records written in every kind of file that users bring, for the tests of moe.data."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard

Rows = Sequence[dict[str, Any]]
SKIPPABLE = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"skip!"
"""A frame of Zstandard without content, as pzstd and seekable files have them."""


def zstd(content: bytes, random: Random) -> bytes:
    """Several frames of random sizes, some with checksums, some empty or skippable."""
    frames = [SKIPPABLE] if random.random() < 0.3 else []
    while content or not frames:
        size = random.randrange(len(content) + 1)
        compressor = zstandard.ZstdCompressor(level=random.randrange(1, 6), write_checksum=random.random() < 0.5)
        frames.append(compressor.compress(content[:size]))
        frames += [SKIPPABLE] if random.random() < 0.2 else []
        content = content[size:]
    return b"".join(frames)


def in_parts(compress: Callable[[bytes], bytes]) -> Callable[[bytes, Random], bytes]:
    """Compression of two parts, cut anywhere."""

    def compressed(content: bytes, random: Random) -> bytes:
        cut = random.randrange(len(content) + 1)
        return compress(content[:cut]) + compress(content[cut:])

    return compressed


COMPRESSIONS: dict[str, Callable[[bytes, Random], bytes]] = {
    "gz": in_parts(gzip.compress), "bz2": in_parts(bz2.compress), "xz": in_parts(lzma.compress), "zst": zstd,
}  # fmt: skip


def json_lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _write_json_lines(folder: Path, rows: Rows, random: Random) -> None:
    (folder / "0.jsonl").write_bytes(json_lines(rows))


def _write_compressed(kind: str) -> Callable[[Path, Rows, Random], None]:
    def write(folder: Path, rows: Rows, random: Random) -> None:
        (folder / f"0.jsonl.{kind}").write_bytes(COMPRESSIONS[kind](json_lines(rows), random))

    return write


def _write_array(folder: Path, rows: Rows, random: Random) -> None:
    text = json.dumps(rows, indent=random.choice([None, 0, 2]), ensure_ascii=random.random() < 0.5)
    (folder / "0.json").write_text(text, encoding="utf-8")


def _tables(rows: Rows, random: Random) -> list[pyarrow.Table]:
    """The rows in one or two tables of one schema."""
    columns = dict.fromkeys(key for row in rows for key in row)
    table = pyarrow.table({key: [row.get(key) for row in rows] for key in columns})
    cut = random.randrange(len(rows) + 1)
    return [part for part in (table[:cut], table[cut:]) if part.num_rows]


def _write_parquet(folder: Path, rows: Rows, random: Random) -> None:
    for number, table in enumerate(_tables(rows, random)):
        options: dict[str, Any] = {"compression": random.choice(["none", "snappy", "zstd"])}
        path = folder / f"{number}.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=random.randrange(1, 9), **options)


def _write_arrow(folder: Path, rows: Rows, random: Random) -> None:
    for number, table in enumerate(_tables(rows, random)):
        new = pyarrow.ipc.new_stream if random.random() < 0.5 else pyarrow.ipc.new_file
        with new(str(folder / f"{number}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=random.randrange(1, 9))


WRITERS: dict[str, Callable[[Path, Rows, Random], None]] = {
    "json lines": _write_json_lines,
    **{f"json lines, {kind}": _write_compressed(kind) for kind in COMPRESSIONS},
    "json array": _write_array,
    "parquet": _write_parquet,
    "arrow": _write_arrow,
}
"""Functions that write rows to files of an empty folder, split at random."""
