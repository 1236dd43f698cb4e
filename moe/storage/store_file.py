"""Open files of object stores, whose errors are OSErrors in words."""

import io
from typing import Any

from moe.storage.store_errors import in_words, upload_in_words


class StoreFile(io.BufferedIOBase):
    """A file opened with fsspec, for reading or writing. Closing a writer completes the file; `discard` leaves none."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def readable(self) -> bool:
        return bool(self._file.readable())

    def writable(self) -> bool:
        return bool(self._file.writable())

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def read(self, size: int | None = -1) -> bytes:
        with in_words(self._url):
            content: bytes = self._file.read(-1 if size is None else size)
            return content

    def read1(self, size: int = -1) -> bytes:
        return self.read(size)

    def readline(self, size: int | None = -1) -> bytes:
        if size is not None and size >= 0:
            return super().readline(size)
        with in_words(self._url):
            line: bytes = self._file.readline()
            return line

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        with in_words(self._url):
            self._file.seek(position, whence)
        return self.tell()

    def tell(self) -> int:
        return int(self._file.tell())

    def write(self, content: Any) -> int:
        with upload_in_words(self._url):
            self._file.write(content)
        return memoryview(content).nbytes

    def discard(self) -> None:
        """Abort an upload, so that no file appears."""
        self._file.closed = True  # or closing, also by the garbage collector, would complete the file
        try:
            self._file.discard()
        finally:
            super().close()

    def close(self) -> None:
        if not self.closed:
            try:
                with upload_in_words(self._url):
                    self._file.close()
            finally:
                super().close()
