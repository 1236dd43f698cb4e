"""Open files of object stores, whose errors are OSErrors in words."""

import io
from typing import Any

from moe.storage.store_errors import in_words, upload_in_words

_BUFFER_BYTES = 1 << 20


class _StoreReader(io.RawIOBase):
    """Unbuffered reads of a file opened with fsspec."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        with in_words(self._url):
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        with in_words(self._url):
            content: bytes = self._file.read()
            return content

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        with in_words(self._url):
            return int(self._file.seek(position, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            try:
                self._file.close()
            finally:
                super().close()


def buffered_reader(file: Any, url: str) -> io.BufferedReader:
    """Reader of a file opened with fsspec. Lines come from its buffer: a store's own cache may ask for every byte of
    them."""
    return io.BufferedReader(_StoreReader(file, url), _BUFFER_BYTES)


class StoreWriter(io.BufferedIOBase):
    """A file opened with fsspec for writing. Closing it completes the file; `discard` leaves none."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def writable(self) -> bool:
        return True

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
