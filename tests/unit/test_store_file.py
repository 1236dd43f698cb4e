"""Readers of object stores: lines and seeks from a buffer, errors in words."""

import io
import random
from typing import Any

import pytest

from moe.storage.store_file import buffered_reader

URL = "s3://bucket/lines.txt"


class CountedFile(io.BytesIO):
    """A file that counts its reads."""

    num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.num_reads += 1
        return super().read(size)


def test_many_lines_take_few_reads() -> None:
    content = b"".join(b"%d\n" % number for number in range(50_000))
    file = CountedFile(content)
    with buffered_reader(file, URL) as reader:
        lines = list(iter(lambda: reader.readline(1000), b""))
    assert b"".join(lines) == content
    assert len(lines) == 50_000
    assert file.num_reads <= 2
    assert file.closed


@pytest.mark.parametrize("seed", range(3))
def test_reads_after_seeks_are_those_of_the_file(seed: int) -> None:
    draws = random.Random(seed)
    content = draws.randbytes(3 << 20)
    expected = io.BytesIO(content)
    with buffered_reader(io.BytesIO(content), URL) as reader:
        for _ in range(50):
            position, size = draws.randrange(len(content)), draws.choice([0, 1, 999, 2 << 20, -1])
            whence = draws.choice([io.SEEK_SET, io.SEEK_END])
            offset = position - len(content) if whence == io.SEEK_END else position
            assert reader.seek(offset, whence) == expected.seek(offset, whence)
            assert reader.read(size) == expected.read(size)
            assert reader.tell() == expected.tell()


def test_errors_name_the_url() -> None:
    class LostFile(io.BytesIO):
        def read(self, *_: Any) -> bytes:
            raise ConnectionResetError("reset by peer")

    with buffered_reader(LostFile(b"text"), URL) as reader, pytest.raises(OSError, match=URL):
        reader.readline()
