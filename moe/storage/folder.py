"""A folder anywhere that fsspec reaches: what is written there appears whole, under its name, or not at all."""

import errno
import os
import posixpath
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from moe.storage import confined

MAX_READ_BYTES = 1 << 28
"""Bound on a file that is read whole, unless a smaller one is given; no tokenizer is larger."""


class FileTooLarge(ValueError):
    """A file has more bytes than any that a run writes there."""


class Folder:
    """A folder by its URL (or plain path). Paths given to its methods are relative to it, with `/`.

    On a file system nothing outside of it is read, whatever links there are in it, and nothing is written through a
    link. With `root`, a folder that it lies in, no link below that is followed: then it cannot be swapped for one
    itself.
    """

    def __init__(self, url: str, root: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.files: AbstractFileSystem
        self.files, self._path = url_to_fs(self.url)
        self._within: str = self._path if root is None else url_to_fs(root)[1]
        self._links = root is None

    @classmethod
    def of_job(cls, url: str) -> "Folder":
        """A job's own folder, by its path alone: no link is followed to it from the folder that it lies in, nor to what
        is in it. Links further up are; who knows the job's root gives that."""
        folder = cls(url)
        folder._within, folder._links = posixpath.dirname(folder._path), False
        return folder

    def below(self, path: str) -> "Folder":
        """A folder in this one; no link takes it, or what is read of it, out of this one."""
        folder = Folder(self.url_of(path))
        folder._within, folder._links = self._within, self._links
        return folder

    @property
    def is_local(self) -> bool:
        return isinstance(self.files, LocalFileSystem)

    def url_of(self, path: str) -> str:
        return f"{self.url}/{path}"

    def path_of(self, path: str) -> str:
        """The path as the file system itself names it. Raises Outside for one that leads out of a store's folder; on a
        file system, whatever opens it does."""
        if not self.is_local and (path.startswith("/") or ".." in path.split("/")):
            raise confined.Outside(errno.EACCES, f"lies outside {self.url}", path)
        return posixpath.join(self._path, path) if path else self._path

    def names(self, path: str = "") -> list[str]:
        """Names of what lies directly in a folder, sorted; empty where there is no such folder."""
        try:
            if self.is_local:
                with confined.listing(self._within, self.path_of(path), links=self._links) as entries:
                    return sorted(entry.name for entry in entries)
            return sorted(self._remote_sizes(path))
        except FileNotFoundError:
            return []

    def sizes(self, path: str = "") -> dict[str, int]:
        """Bytes of what lies directly in a folder, by name, without links; empty where there is no such folder."""
        try:
            if self.is_local:
                return confined.sizes(self._within, self.path_of(path), links=self._links)
            return self._remote_sizes(path)
        except (FileNotFoundError, NotADirectoryError, confined.Outside):
            return {}

    def _remote_sizes(self, path: str) -> dict[str, int]:
        self.files.invalidate_cache()  # object stores remember listings; what is new has to be seen
        entries = self.files.ls(self.path_of(path), detail=True)
        return {posixpath.basename(entry["name"].rstrip("/")): int(entry["size"] or 0) for entry in entries}

    def open(self, path: str) -> IO[bytes]:
        """A file that lies in the folder, for reading. Raises FileNotFoundError, and Outside for one that does not."""
        if self.is_local:
            return confined.open_file(self._within, self.path_of(path), links=self._links)
        return cast(IO[bytes], self.files.open(self.path_of(path), "rb"))

    def read(
        self, path: str, start: int = 0, end: int | None = None, max_bytes: int = MAX_READ_BYTES
    ) -> bytes:
        """A file, or its bytes from `start` to `end`, opened as `open` does. Raises FileNotFoundError, and FileTooLarge
        where that is more than `max_bytes`, having read nothing."""
        fault = FileTooLarge(f"{path} has more than {max_bytes:,} bytes, which no run writes there")
        if self.is_local:
            with self.open(path) as file:
                last = os.fstat(file.fileno()).st_size
                num_bytes = min(last, last if end is None else end) - start
                if num_bytes > max_bytes:
                    raise fault
                file.seek(start)
                return file.read(max(num_bytes, 0))
        remote_path = self.path_of(path)
        if end is None or end - start > max_bytes:
            self.files.invalidate_cache()  # object stores remember sizes
            last = int(self.files.size(remote_path) or 0)
            end = last if end is None else min(last, end)  # and no more, should it grow
            if end - start > max_bytes:
                raise fault
            if end <= start:
                return b""
        return cast(bytes, self.files.cat_file(remote_path, start=start, end=end))

    def make(self) -> None:
        """Makes the folder itself, and those above it below its root, where they are not there; stores have none."""
        if self.is_local:
            confined.make_folder(self._within, self._path)

    @contextmanager
    def create(self, path: str, mode: int = 0o666) -> Iterator[IO[bytes]]:
        """A file to write, in folders that are made if need be. It takes its name when this ends without an error:
        whole by then, and on a file system durable; what breaks off leaves nothing, and what was there."""
        if self.is_local:
            with confined.create(self._within, self.path_of(path), mode) as file:
                yield file
            return
        final = self.path_of(path)
        draft = posixpath.join(posixpath.dirname(final), f".{secrets.token_hex(8)}.draft")
        try:
            # A store that is told of an error by a stream's end keeps what it has got so far.
            with self._put(draft, lambda: self.files.open(draft, "wb")) as stream:
                yield stream
            self.files.mv(draft, final)
        except BaseException:
            with suppress(Exception):  # what happened before is what matters
                self.files.rm_file(draft)
            raise

    def write(self, path: str, content: bytes, mode: int = 0o666) -> None:
        """Write a file that readers see whole or not at all, and durably once this returns."""
        if self.is_local or self._streams:
            with self.create(path, mode) as file:
                file.write(content)
            return
        final = self.path_of(path)
        self._put(final, lambda: self.files.pipe_file(final, content))

    @property
    def _streams(self) -> bool:
        """Whether the store has no request that puts a whole file, as object stores have."""
        return getattr(self.files.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file

    def _put(self, path: str, put: Callable[[], Any]) -> Any:
        """The answer of `put`, which makes the file `path` of a store; where that has folders, they are made."""
        try:
            return put()
        except FileNotFoundError:
            self.files.makedirs(posixpath.dirname(path), exist_ok=True)
            return put()

    def remove(self, path: str) -> None:
        """Remove a file or a folder with all that is in it, but nothing through a link; no error where it is gone
        already."""
        with suppress(FileNotFoundError):
            if self.is_local:
                confined.remove(self._within, self.path_of(path))
            else:
                self.files.rm(self.path_of(path), recursive=True)
