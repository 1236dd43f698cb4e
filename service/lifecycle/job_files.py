"""Files of a job that its users may have: what it was asked, how it ended, its checkpoints, its logs.

What else lies in a job's folder is not theirs, such as an attempt's `launch.json`, which holds a token. On a file
system nothing is read through a link: it would be a way to that, or out of the folder.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import fsspec

from moe import beneath
from moe.train import marker as markers
from moe.train.marker import Marker
from service.errors import NotFound
from service.lifecycle.file_kinds import Kind, kind_of
from service.lifecycle.roots import StorageRoots


@dataclass(frozen=True)
class JobFile:
    path: str
    """Relative to the job's folder."""
    kind: Kind
    size_bytes: int
    sha256: str | None
    """Of what was written, where a checkpoint's marker says it."""


class JobFiles:
    """The files of one job. Its methods raise OSError when storage cannot be read."""

    def __init__(self, roots: StorageRoots, storage: str) -> None:
        found = roots.find(storage)
        if found is None:
            raise NotFound(f"its storage {storage} lies under no storage root of this service")
        self._root = found[0]
        self._files: Any
        self._files, self._folder = fsspec.core.url_to_fs(storage)
        self._is_local = "://" not in self._root

    def listed(self, kinds: frozenset[Kind] = frozenset(Kind)) -> list[JobFile]:
        """By path; of checkpoints the committed ones, and of those the files that their markers name."""
        found = [*self._plain(kinds)]
        if Kind.CHECKPOINTS in kinds:
            for name in self._names("checkpoints"):
                found += self._of_checkpoint(name) if name.endswith(markers.SUFFIX) else ()
        return sorted(found, key=lambda file: file.path)

    def open(self, path: str) -> tuple[IO[bytes], int]:
        """A file and its size. Raises NotFound for what is not there or not given to anybody."""
        if kind_of(path) is None:
            raise NotFound(
                f"{path[:200]!r} is no file that is handed out; a job's /files lists those that are"
            )
        try:
            file = self._open(path)
            return file, file.seek(0, 2)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"there is no {path!r} any more, or not yet") from None

    def _plain(self, kinds: frozenset[Kind]) -> Iterator[JobFile]:
        places = {
            Kind.SPEC: [""],
            Kind.RESULT: [f"attempts/{name}" for name in self._names("attempts")],
            Kind.LOGS: [f"logs/{name}" for name in self._names("logs")],
        }
        for kind, folders in places.items():
            for folder in folders if kind in kinds else ():
                for name, size_bytes in self._entries(folder).items():
                    path = f"{folder}/{name}".lstrip("/")
                    if kind_of(path) == kind:
                        yield JobFile(path, kind, size_bytes, None)

    def _of_checkpoint(self, name: str) -> Iterator[JobFile]:
        path = f"checkpoints/{name}"
        if kind_of(path) is None:
            return
        try:
            with self._open(path) as file:
                content = file.read()
            marker = Marker.from_bytes(content)
        except (ValueError, FileNotFoundError):
            return  # torn, or removed just now: no checkpoint
        for inner, seal in marker.files.items():
            if kind_of(inner_path := f"checkpoints/{marker.name}/{inner}") is not None:
                yield JobFile(inner_path, Kind.CHECKPOINTS, seal.size_bytes, seal.sha256)
        yield JobFile(path, Kind.CHECKPOINTS, len(content), markers.seal(content).sha256)

    def _open(self, path: str) -> IO[bytes]:
        if self._is_local:
            return beneath.open_file(self._root, f"{self._folder}/{path}", links=False)
        return cast(IO[bytes], self._files.open(f"{self._folder}/{path}", "rb"))

    def _names(self, folder: str) -> list[str]:
        return list(self._entries(folder))

    def _entries(self, folder: str) -> dict[str, int]:
        """Names and sizes of what lies directly in a folder, without links."""
        path = f"{self._folder}/{folder}".rstrip("/")
        try:
            if self._is_local:
                return beneath.sizes(self._root, path, links=False)
            self._files.invalidate_cache(path)
            entries = self._files.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: int(entry["size"] or 0) for entry in entries}
