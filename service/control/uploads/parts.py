"""Parts of files being uploaded. A part is a file of its own, so that a killed control plane loses none.

A part is named by its first byte and its end. A file's parts are those that follow one another from byte 0 on; if two
begin at the same byte, the longer one counts.
"""

import hashlib
from collections.abc import Iterator
from datetime import datetime

from moe.storage.folder import Folder

_PARTS, _FILES = "parts", "files"


class WrongHash(ValueError):
    """The content of a file does not match its SHA-256."""


class Parts:
    """Parts and complete, verified files below the folder of uploads."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def names(self) -> dict[tuple[str, int], str]:
        """Folders of parts, by (sha256, size) of their file."""
        names = {}
        for name in self._folder.names(_PARTS):
            sha256, _, size = name.partition("-")
            if size.isdecimal():
                names[sha256, int(size)] = name
        return names

    def offset(self, sha256: str, size_bytes: int) -> int:
        """Number of bytes that were received."""
        chain = self._chain(sha256, size_bytes)
        return chain[-1][1] if chain else 0

    def append(self, sha256: str, size_bytes: int, offset: int, content: bytes) -> None:
        """Store a part durably."""
        end = offset + len(content)
        self._folder.write(f"{_folder_of(sha256, size_bytes)}/{offset:019}-{end:019}", content)

    def assemble(self, sha256: str, size_bytes: int) -> None:
        """Assemble the file from its parts, and remove them. Raises WrongHash, without a file, if the hash differs."""
        digest = hashlib.sha256()
        folder = _folder_of(sha256, size_bytes)
        try:
            with self._folder.create(f"{_FILES}/{sha256}") as file:
                for start, end in self._chain(sha256, size_bytes):
                    content = self._folder.read(f"{folder}/{start:019}-{end:019}")
                    digest.update(content)
                    file.write(content)
                if digest.hexdigest() != sha256:
                    raise WrongHash(digest.hexdigest())
        except WrongHash:
            self._folder.remove(folder)
            raise
        self._folder.remove(folder)

    def complete(self) -> set[str]:
        """SHA-256 of files that are complete and in no upload yet."""
        return set(self._folder.names(_FILES))

    def file_path(self, sha256: str) -> str:
        return f"{_FILES}/{sha256}"

    def remove_complete(self, sha256: str) -> None:
        self._folder.remove(self.file_path(sha256))

    def remove_abandoned(self, before: datetime) -> Iterator[str]:
        """Remove files, and parts of files, that have not changed since `before`; yield their names."""
        for name in self._folder.names(_PARTS):
            parts = self._folder.names(f"{_PARTS}/{name}")
            if all(self._folder.modified(f"{_PARTS}/{name}/{part}") < before for part in parts[-1:]):
                self._folder.remove(f"{_PARTS}/{name}")
                yield name
        for sha256 in self._folder.names(_FILES):
            if self._folder.modified(self.file_path(sha256)) < before:
                self.remove_complete(sha256)
                yield sha256

    def _chain(self, sha256: str, size_bytes: int) -> list[tuple[int, int]]:
        """(start, end) of the parts that follow one another."""
        ends: dict[int, int] = {}
        for name in self._folder.names(_folder_of(sha256, size_bytes)):
            start, _, end = name.partition("-")
            if start.isdecimal() and end.isdecimal():
                ends[int(start)] = max(int(end), ends.get(int(start), 0))
        chain, offset = [], 0
        while (end_ := ends.get(offset, 0)) > offset:
            chain.append((offset, end_))
            offset = end_
        return chain


def _folder_of(sha256: str, size_bytes: int) -> str:
    return f"{_PARTS}/{sha256}-{size_bytes}"
