"""Files are read in bounded memory, however large they are and however well they are compressed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

NUM_ROWS, TEXT = 60_000, "a text of some length, " * 100
MAX_GROWTH_BYTES = 64 << 20
PROGRAM = """
import resource, sys
import pyarrow, pyarrow.parquet, pyarrow.ipc
from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.locations import Location
from moe.data.sequences.formats import DocumentReader
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
path, format = sys.argv[1:]
before, faults = peak(), Faults()
file = DataFile("data", Location("file", path))
num_chars = sum(map(len, DocumentReader(format, "text", "data").texts(file, faults)))
print(num_chars, faults.num_bad, peak() - before)
"""


def table() -> pyarrow.Table:
    return pyarrow.table({"text": [f"{number} {TEXT}" for number in range(NUM_ROWS)]})


def _write_array(path: Path) -> None:
    with path.open("w") as file:
        for number in range(NUM_ROWS):
            file.write(("[" if number == 0 else ",\n") + json.dumps({"text": f"{number} {TEXT}"}))
        file.write("]")


def _write_zstd(path: Path) -> None:
    with zstandard.open(path, "wb", cctx=zstandard.ZstdCompressor(level=1)) as file:
        for number in range(NUM_ROWS):
            file.write(json.dumps({"text": f"{number} {TEXT}"}).encode() + b"\n")


def _write_arrow(path: Path) -> None:
    rows = table()
    with pyarrow.ipc.new_stream(str(path), rows.schema) as writer:
        writer.write_table(rows, max_chunksize=1000)


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a.json": ("jsonl", _write_array),
    "a.jsonl.zst": ("jsonl", _write_zstd),
    "a.parquet": ("parquet", lambda path: pyarrow.parquet.write_table(table(), path, row_group_size=NUM_ROWS)),
    "b.parquet": ("parquet", lambda path: pyarrow.parquet.write_table(table(), path, row_group_size=1000,
                                                                      compression="zstd", use_dictionary=False)),
    "a.arrow": ("arrow", _write_arrow),
}  # fmt: skip


def read(path: Path, format: str) -> tuple[int, int, int]:
    """(characters of all texts, bad records, growth of the process's memory in bytes)."""
    command = [sys.executable, "-c", PROGRAM, str(path), format]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    num_chars, num_bad, growth_bytes = map(int, output.split())
    return num_chars, num_bad, growth_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_large_files_are_read_in_pieces(name: str, tmp_path: Path) -> None:
    format, write = WRITERS[name]
    write(tmp_path / name)
    num_chars, num_bad, growth_bytes = read(tmp_path / name, format)
    assert (num_chars, num_bad) == (sum(len(f"{number} {TEXT}") for number in range(NUM_ROWS)), 0)
    assert growth_bytes < MAX_GROWTH_BYTES < num_chars / 2


@pytest.mark.slow
def test_a_few_bytes_that_decompress_to_gigabytes_are_one_bad_record(tmp_path: Path) -> None:
    compressor = zstandard.ZstdCompressor().compressobj()
    with (tmp_path / "a.jsonl.zst").open("wb") as file:
        for _ in range(2000):
            file.write(compressor.compress(b"x" * (1 << 20)))
        file.write(compressor.flush())
    assert (tmp_path / "a.jsonl.zst").stat().st_size < 1 << 20
    for format in ("jsonl", "text"):
        num_chars, num_bad, growth_bytes = read(tmp_path / "a.jsonl.zst", format)
        assert (num_chars, num_bad) == (0, 1)
        assert growth_bytes < 4 * MAX_GROWTH_BYTES, "the longest record, and its copies"
