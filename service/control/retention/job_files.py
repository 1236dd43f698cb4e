"""Files of a job that its users may read: spec, results, checkpoints, logs, traces.

Others are private, such as a launch, which holds a token. No link is followed, since it could lead to those, or out
of the folder.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.marker import Marker
from service.control.errors import NotFound
from service.control.jobs.roots import StorageRoots
from service.wire.file_kinds import FileKind, kind_of


@dataclass(frozen=True)
class JobFile:
    path: str
    """Path relative to the job's folder."""
    kind: FileKind
    size_bytes: int
    sha256: str | None
    """Checksum from the checkpoint's marker; None for other files."""


@dataclass(frozen=True)
class ServedFile:
    """An open file."""

    file: IO[bytes]
    size_bytes: int
    version: str
    """Changes with the file."""


class JobFiles:
    """Readable files of one job. Methods raise OSError when storage cannot be read."""

    def __init__(self, roots: StorageRoots, storage: str) -> None:
        if roots.find(storage) is None:
            raise NotFound(f"its storage {storage} is outside the storage roots of this service")
        self._folder = roots.folder(storage)

    def list_files(self, kinds: frozenset[FileKind] = frozenset(FileKind)) -> list[JobFile]:
        """Files by path; of checkpoints, only committed ones' files."""
        files = [*self._other_files(kinds)]
        if FileKind.CHECKPOINTS in kinds:
            for name in self._folder.sizes(markers.FOLDER):
                files += self._checkpoint_files(name) if name.endswith(markers.SUFFIX) else ()
        return sorted(files, key=lambda file: file.path)

    def open(self, path: str) -> ServedFile:
        """Raises NotFound for a missing or private file."""
        if kind_of(path) is None:
            raise NotFound(f"{path[:200]!r} is not a served file; the job's /files lists the served ones")
        try:
            file = self._folder.open(path)
            return ServedFile(file, file.seek(0, 2), self._folder.version(path, file))
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"there is no file {path!r}, yet or any more") from None

    def _other_files(self, kinds: frozenset[FileKind]) -> Iterator[JobFile]:
        folders_by_kind = {
            FileKind.SPEC: [""],
            FileKind.RESULT: [f"attempts/{name}" for name in self._folder.sizes("attempts")],
            FileKind.LOGS: [f"logs/{name}" for name in self._folder.sizes("logs")],
            FileKind.PROFILE: ["profile"],
        }
        for kind, folders in folders_by_kind.items():
            for folder in folders if kind in kinds else ():
                for name, size_bytes in self._folder.sizes(folder).items():
                    path = f"{folder}/{name}".lstrip("/")
                    if kind_of(path) == kind:
                        yield JobFile(path, kind, size_bytes, None)

    def _checkpoint_files(self, name: str) -> Iterator[JobFile]:
        path = f"checkpoints/{name}"
        if kind_of(path) is None:
            return
        try:
            content = self._folder.read(path, 0, markers.MAX_BYTES + 1)
            marker = Marker.from_bytes(content)
        except (ValueError, OSError):
            return  # torn, a link, unreadable or just removed: not available
        for inner, seal in marker.files.items():
            if kind_of(inner_path := f"checkpoints/{marker.name}/{inner}") is not None:
                yield JobFile(inner_path, FileKind.CHECKPOINTS, seal.size_bytes, seal.sha256)
        yield JobFile(path, FileKind.CHECKPOINTS, len(content), markers.seal(content).sha256)
