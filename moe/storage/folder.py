"""Folder on any fsspec file system, with atomic writes: files appear complete or not at all."""

import errno
import math
import os
import posixpath
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import IO, Any, cast

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from moe.storage import confined
from moe.storage.packages import problem_of
from moe.storage.store_errors import in_words, missing_bucket
from moe.storage.store_file import StoreWriter, buffered_reader

MAX_READ_BYTES = 1 << 28
"""Default size limit for `read`: more than a tokenizer needs."""


_BUCKETS = frozenset({"abfs", "adl", "az", "gcs", "gs", "s3", "s3a"})
"""Protocols of object stores: without folders, below buckets that only their owner creates."""
_UPLOADS = frozenset({"gcs", "gs", "s3", "s3a"})
"""Protocols of stores where a file appears when its upload is completed, and not if that is aborted."""

_HIDES_MISSING_BUCKETS = frozenset({"gcs", "gs"})
"""Protocols whose client takes a missing bucket for a missing file."""
BUCKET_CHECK_S = 30.0
"""Time for which such a bucket counts as existing, once seen: a bucket may be deleted while a job runs."""
_seen_buckets: dict[str, float] = {}
"""Monotonic times at which buckets of such stores were last seen."""

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links, and of a file with too many."""
_COPY_BYTES = 1 << 20


class FileTooLarge(ValueError):
    """File larger than any that a run writes."""


class Folder:
    """Folder by URL or plain path. Methods take `/`-separated paths relative to it.

    Errors of stores are OSErrors in words (`store_errors`).

    On a local file system, links cannot lead reads outside the folder, and writes follow no links. With `root`, which
    contains the folder, no link below `root` is followed, so that the folder itself cannot be swapped for a link.
    """

    def __init__(self, url: str, root: str | None = None) -> None:
        """Raises OSError (ENOSYS), with the remedy, if the URL's file system is not installed."""
        self.url = url.rstrip("/")
        self.files: AbstractFileSystem
        try:
            self.files, self._path = url_to_fs(self.url)
        except ImportError as error:
            raise OSError(errno.ENOSYS, problem_of(self.url) or str(error), url) from None
        protocols = {self.files.protocol} if isinstance(self.files.protocol, str) else set(self.files.protocol)
        self._is_bucket = bool(protocols & _BUCKETS)
        self._completes_uploads = bool(protocols & _UPLOADS)
        self._hides_missing_bucket = bool(protocols & _HIDES_MISSING_BUCKETS)
        self._root: str = self._path if root is None else url_to_fs(root)[1]
        self._links = root is None

    @classmethod
    def of_job(cls, url: str) -> "Folder":
        """Folder of a job: neither the folder itself nor anything in it may be a link.

        Links on the path to its parent are followed; pass `root` if the root of jobs is known.
        """
        folder = cls(url)
        folder._root, folder._links = posixpath.dirname(folder._path), False
        return folder

    def subfolder(self, path: str) -> "Folder":
        """Folder in this one; reads there cannot leave this one through links."""
        folder = Folder(self.url_of(path))
        folder._root, folder._links = self._root, self._links
        return folder

    @property
    def is_local(self) -> bool:
        return isinstance(self.files, LocalFileSystem)

    def url_of(self, path: str) -> str:
        return f"{self.url}/{path}"

    def path_of(self, path: str) -> str:
        """Path in the file system's own form.

        Raises Outside for paths that leave an object store's folder; local paths are checked when opened.
        """
        if not self.is_local and (path.startswith("/") or ".." in path.split("/")):
            raise confined.Outside(errno.EACCES, f"is outside {self.url}", path)
        return posixpath.join(self._path, path) if path else self._path

    def names(self, path: str = "") -> list[str]:
        """Sorted names of a folder's entries; empty if there is no such folder."""
        try:
            if self.is_local:
                with confined.listing(self._root, self.path_of(path), links=self._links) as entries:
                    return sorted(entry.name for entry in entries)
            return sorted(self._remote_sizes(path))
        except FileNotFoundError:
            return []

    def sizes(self, path: str = "") -> dict[str, int]:
        """Bytes of a folder's entries by name, without links; empty if there is no such folder."""
        try:
            if self.is_local:
                return confined.sizes(self._root, self.path_of(path), links=self._links)
            return self._remote_sizes(path)
        except (FileNotFoundError, NotADirectoryError, confined.Outside):
            return {}

    def _remote_sizes(self, path: str) -> dict[str, int]:
        remote_path = self.path_of(path)
        with self._remote(path):
            self.files.invalidate_cache()  # object stores cache listings
            entries = self.files.ls(remote_path, detail=True)
        sizes = {entry["name"].rstrip("/"): int(entry["size"] or 0) for entry in entries}
        # Consoles and other clients mark a folder by an empty object with its own name, which stores list in it.
        return {posixpath.basename(name): size for name, size in sizes.items() if name != remote_path.rstrip("/")}

    def open(self, path: str) -> IO[bytes]:
        """Open a file for reading. Raises FileNotFoundError, and Outside for files outside the folder."""
        if self.is_local:
            return confined.open_file(self._root, self.path_of(path), links=self._links)
        remote_path = self.path_of(path)
        with self._remote(path):
            self.files.invalidate_cache()  # object stores cache sizes
            return buffered_reader(self.files.open(remote_path, "rb"), self.url_of(path))

    def version(self, path: str, file: IO[bytes]) -> str:
        """Text that changes with a file's content, without reading it; `file` is the open one."""
        if self.is_local:
            status = os.fstat(file.fileno())
            return f"{status.st_size:x}-{status.st_mtime_ns:x}"
        with self._remote(path):
            return str(self.files.ukey(self.path_of(path)))

    def read(self, path: str, start: int = 0, end: int | None = None, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Read a file, or its bytes from `start` to `end`.

        Raises FileNotFoundError, Outside, and FileTooLarge, before reading, for more than `max_bytes`.
        """
        fault = FileTooLarge(f"{path} has more than {max_bytes:,} bytes, too many for a file of a run")
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
            with self._remote(path):
                self.files.invalidate_cache()
                last = int(self.files.size(remote_path) or 0)
            end = last if end is None else min(last, end)  # stop here even if it grows
            if end - start > max_bytes:
                raise fault
            if end <= start:
                return b""
        with self._remote(path):
            return cast(bytes, self.files.cat_file(remote_path, start=start, end=end))

    def make(self) -> None:
        """Create the folder and its missing parents below the root; no-op on object stores."""
        if self.is_local:
            confined.make_folder(self._root, self._path)

    @contextmanager
    def create(self, path: str, mode: int = 0o666) -> Iterator[IO[bytes]]:
        """Create a file atomically: it gets its name if the block succeeds.

        It is complete then and, on a local file system, durable. Creates missing folders. On failure, nothing is
        left, and an existing file stays.
        """
        if self.is_local:
            with confined.create(self._root, self.path_of(path), mode) as file:
                yield file
            return
        final = self.path_of(path)
        if self._completes_uploads:
            upload = self._open_for_writing(path, final)
            try:
                yield cast(IO[bytes], upload)
                upload.close()
            except BaseException:
                with suppress(Exception):  # the first error is the one to report
                    upload.discard()
                raise
            return
        draft = posixpath.join(posixpath.dirname(final), f".{secrets.token_hex(8)}.draft")
        try:
            # Some stores keep a partial file if a stream ends with an error.
            with self._open_for_writing(path, draft) as stream:
                yield cast(IO[bytes], stream)
            with in_words(self.url_of(path)):
                self.files.mv(draft, final)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self.files.rm_file(draft)
            raise

    def _open_for_writing(self, path: str, remote_path: str) -> StoreWriter:
        file = self._put(path, remote_path, lambda: self.files.open(remote_path, "wb"))
        return StoreWriter(file, self.url_of(path))

    def write(self, path: str, content: bytes, mode: int = 0o666) -> None:
        """Write a file atomically; it is durable on return."""
        if self.is_local or self._streams:
            with self.create(path, mode) as file:
                file.write(content)
            return
        final = self.path_of(path)
        self._put(path, final, lambda: self.files.pipe_file(final, content))

    def claim(self, path: str, holder: bytes) -> bool:
        """Whether this is the first claim of `path`, which `holder` describes. Of several at once at most one is: on an
        object store, which has no exclusive creation, maybe none."""
        if self.is_local:
            return confined.create_first(self._root, self.path_of(path), holder)
        folder, _, name = path.rpartition("/")
        own_name = f"{name}.{secrets.token_hex(8)}"
        self.write(posixpath.join(folder, own_name), holder)
        # Listings are strongly consistent: of two claims, the later one sees both.
        return [other for other in self.names(folder) if other.startswith(f"{name}.")] == [own_name]

    def copy(self, source: str, target: str) -> None:
        """Give a file of the folder another name, which outlives the first: a hard link where there are such, else a
        copy. An existing file stays."""
        if self.is_local:
            try:
                confined.link(self._root, self.path_of(source), self.path_of(target))
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with self.open(source) as file, self.create(target) as copy:
                    shutil.copyfileobj(file, copy, _COPY_BYTES)
            return
        remote_source, remote_target = self.path_of(source), self.path_of(target)
        self._put(target, remote_target, lambda: self.files.cp_file(remote_source, remote_target))

    def modified(self, path: str) -> datetime:
        """Time of a file's last change. Raises FileNotFoundError."""
        with self._remote(path):
            modified_at = cast(datetime, self.files.modified(self.path_of(path)))
        return modified_at if modified_at.tzinfo else modified_at.replace(tzinfo=UTC)

    @contextmanager
    def _remote(self, path: str) -> Iterator[None]:
        """Context of requests to a store for `path`: its errors in words, also that of a missing bucket."""
        try:
            with in_words(self.url_of(path)):
                yield
        except FileNotFoundError:
            if self._hides_missing_bucket:
                self._require_bucket(path)
            raise

    def _require_bucket(self, path: str) -> None:
        """Ask for a listing, which fails for a missing bucket alone and needs no right beyond those of objects."""
        bucket = self._path.partition("/")[0]
        now_s = time.monotonic()
        if now_s - _seen_buckets.get(bucket, -math.inf) < BUCKET_CHECK_S:
            return
        try:
            with in_words(self.url_of(path)):
                self.files.call("GET", "b/{}/o", bucket, maxResults=1)
        except FileNotFoundError:
            raise missing_bucket(self.url_of(path)) from None
        _seen_buckets[bucket] = now_s

    @property
    def _streams(self) -> bool:
        """Whether the store lacks a request to put a whole file, which object stores have."""
        return getattr(self.files.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file

    def _put(self, path: str, remote_path: str, put: Callable[[], Any]) -> Any:
        """Result of `put`, which creates the file `remote_path` of a store; missing folders are created if put needs
        them, buckets never."""
        with in_words(self.url_of(path)):
            try:
                return put()
            except FileNotFoundError:
                if self._is_bucket:
                    raise missing_bucket(self.url_of(path)) from None
                self.files.makedirs(posixpath.dirname(remote_path), exist_ok=True)
                return put()

    def remove(self, path: str) -> None:
        """Remove a file or folder (recursively), without following links; no error if it does not exist."""
        with suppress(FileNotFoundError):
            if self.is_local:
                confined.remove(self._root, self.path_of(path))
            else:
                remote_path = self.path_of(path)
                with self._remote(path):
                    self.files.rm(remote_path, recursive=True)
