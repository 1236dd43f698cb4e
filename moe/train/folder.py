"""A folder anywhere that fsspec reaches: small files whole, one of them atomically."""

import os
import posixpath
from contextlib import suppress
from typing import IO, cast

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from moe import beneath


class Folder:
    """A folder by its URL (or plain path). Paths given to its methods are relative to it, with `/`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.files: AbstractFileSystem
        self.files, self._root = url_to_fs(self.url)
        self._within = self._root
        """Of a local folder: nothing outside of this is read or listed, whatever links there are."""

    def below(self, path: str) -> "Folder":
        """A folder in this one; no link takes it, or what is read of it, out of this one."""
        folder = Folder(self.url_of(path))
        folder._within = self._within
        return folder

    @property
    def is_local(self) -> bool:
        return isinstance(self.files, LocalFileSystem)

    def url_of(self, path: str) -> str:
        return f"{self.url}/{path}"

    def path_of(self, path: str) -> str:
        """The path as the file system itself names it."""
        return posixpath.join(self._root, path) if path else self._root

    def make(self, path: str = "") -> None:
        self.files.makedirs(self.path_of(path), exist_ok=True)

    def names(self, path: str = "") -> list[str]:
        """Names of what lies directly in a folder, sorted; empty where there is no such folder."""
        self.files.invalidate_cache()
        try:
            if self.is_local:
                with beneath.listing(self._within, self.path_of(path)) as there:
                    return sorted(entry.name for entry in there)
            entries = self.files.ls(self.path_of(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted(posixpath.basename(str(entry).rstrip("/\\").replace("\\", "/")) for entry in entries)

    def open(self, path: str) -> IO[bytes]:
        """A file, for reading; in a local folder only what lies in it, also by links. Raises FileNotFoundError."""
        if self.is_local:
            return beneath.open_file(self._within, self.path_of(path))
        return cast(IO[bytes], self.files.open(self.path_of(path), "rb"))

    def read(self, path: str) -> bytes:
        """The whole of a file, which is opened as `open` does. Raises FileNotFoundError."""
        with self.open(path) as file:
            return file.read()

    def write(self, path: str, content: bytes) -> None:
        """Write a file that nothing yet relies on; a local one is on the disk when this returns."""
        self.make(posixpath.dirname(path))
        with self.files.open(self.path_of(path), "wb") as stream:
            stream.write(content)
            if self.is_local:
                stream.flush()
                os.fsync(stream.fileno())

    def write_atomically(self, path: str, content: bytes) -> None:
        """Write a file that readers see whole or not at all, and durably once this returns.

        Locally by a temporary name and a rename; elsewhere as one object, which stores put whole.
        """
        if not self.is_local:
            self.files.pipe_file(self.path_of(path), content)
            return
        final = self.path_of(path)
        temporary = f"{final}.{os.getpid()}.tmp"
        self.write(f"{path}.{os.getpid()}.tmp", content)
        os.replace(temporary, final)
        self.sync(posixpath.dirname(path))

    def sync(self, path: str = "") -> None:
        """Make the names in a local folder durable; stores elsewhere do so by themselves."""
        if not self.is_local:
            return
        descriptor = os.open(self.path_of(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: str) -> None:
        """Remove a file or a folder with all that is in it; nothing happens where it is gone already."""
        with suppress(FileNotFoundError):
            self.files.rm(self.path_of(path), recursive=True)
