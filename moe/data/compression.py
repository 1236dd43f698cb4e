"""Compressed files: gzip, bzip2, xz and Zstandard, recognized by their first bytes."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import IO, Any

DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of reading a damaged or missing file."""
_HEAD_BYTES, _BUFFER_BYTES = 16, 1 << 16
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
"""Bytes behind `BZh` and a digit in every bzip2 file, which hardly occur in text."""


def _zstd(raw: IO[bytes]) -> Any:
    import pyarrow  # its output is bounded, and a file that ends too early is an error to it

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")


def _decompressor(head: bytes) -> Callable[[IO[bytes]], Any] | None:
    if head.startswith(b"\x1f\x8b\x08"):
        return gzip.open
    if head.startswith(b"BZh") and head[4:10] in _BZIP2_BLOCKS:
        return bz2.open
    if head.startswith(b"\xfd7zXZ\x00"):
        return lzma.open
    # pzstd begins with a skippable frame, whose first byte is 0x50 to 0x5f.
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50):
        return _zstd
    return None


class _Decompressed(io.RawIOBase):
    """Content of a compressed file. Raises OSError, with the offset in the file, for a damaged one."""

    def __init__(self, raw: IO[bytes], content: Any) -> None:
        self._raw, self._content = raw, content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            chunk = self._content.read1(len(buffer))
        except DAMAGED as error:
            raise OSError(f"{error} (near byte {self._raw.tell():,} of the compressed file)") from None
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        if not self.closed:
            self._content.close()
        super().close()


def decompress(raw: IO[bytes]) -> IO[bytes] | None:
    """Content of a file compressed by gzip, bzip2, xz or Zstandard, whatever its name, also of several compressed files
    one after another. None for other files, which are rewound. Reading a damaged file raises OSError."""
    head = raw.read(_HEAD_BYTES)
    raw.seek(0)
    opener = _decompressor(head)
    return None if opener is None else io.BufferedReader(_Decompressed(raw, opener(raw)), _BUFFER_BYTES)
