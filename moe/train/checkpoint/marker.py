"""Commit marker of a checkpoint: a file whose presence commits it and whose name orders it."""

import hashlib
import json
import re
from typing import Any, Literal

from pydantic import ValidationError

from moe.spec.base import Count, CountOrZero, Frozen
from moe.storage import sealing
from moe.storage.folder import Folder

FOLDER = "checkpoints"
"""Folder in a job's storage with its checkpoints and markers."""
SUFFIX = ".commit.json"
_NAME = re.compile(r"step-(\d{8,})\.a(\d+)\.g(\d+)")
MAX_BYTES = 1 << 24
"""Size limit of a marker: enough for a hundred thousand files."""


class FileSeal(Frozen):
    """Size and SHA-256 of one file of a checkpoint."""

    size_bytes: CountOrZero
    sha256: str


class Marker(Frozen):
    """Commits a checkpoint and lists its files.

    Runs resume from the newest checkpoint that matches its marker: most steps, then latest attempt, then latest
    worker group.
    """

    version: Literal[1] = 1
    step: CountOrZero
    """Finished steps, and number of the next batch."""
    attempt: CountOrZero
    group: CountOrZero
    num_workers: Count
    created_at: str
    files: dict[str, FileSeal]
    """Seals by path, relative to the checkpoint's folder."""

    @property
    def name(self) -> str:
        """Folder name under `checkpoints/`."""
        return name_of(self.step, self.attempt, self.group)

    @property
    def size_bytes(self) -> int:
        return sum(seal.size_bytes for seal in self.files.values())

    def to_bytes(self) -> bytes:
        body = self.model_dump(mode="json")
        return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Marker":
        """Parse a marker. Raises ValueError if it is torn or altered."""
        if len(content) > MAX_BYTES:
            raise ValueError(f"its marker has more than {MAX_BYTES:,} bytes")
        try:
            body: dict[str, Any] = json.loads(content)
            digest = body.pop("sha256")
            marker = cls.model_validate(body)
        except (ValueError, KeyError, AttributeError, TypeError, ValidationError, RecursionError) as error:
            raise ValueError("its marker is incomplete") from error
        if digest != _digest(body):
            raise ValueError("its marker was modified")
        return marker


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def name_of(step: int, attempt: int, group: int) -> str:
    """Folder name of a checkpoint, unique per attempt and worker group."""
    return f"step-{step:08d}.a{attempt}.g{group}"


def order(name: str) -> tuple[int, int, int] | None:
    """(step, attempt, group) from a checkpoint's folder name; None for other names."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def is_copy(name: str) -> bool:
    """Whether a checkpoint was copied from another job, that is, has attempt 0."""
    return (order(name) or (0, 1, 0))[1] == 0


def list_committed(checkpoints: Folder) -> list[str]:
    """Names of checkpoints with a marker, newest first; their files are not verified."""
    names = [name.removesuffix(SUFFIX) for name in checkpoints.names() if name.endswith(SUFFIX)]
    return sorted((name for name in names if order(name)), key=lambda name: order(name) or (), reverse=True)


def read(checkpoints: Folder, name: str) -> Marker:
    """Read a checkpoint's marker. Raises ValueError if it is torn, altered or another checkpoint's."""
    marker = Marker.from_bytes(checkpoints.read(name + SUFFIX, 0, MAX_BYTES + 1))
    if marker.name != name:
        raise ValueError(f"its marker belongs to {marker.name}")
    return marker


def fault(checkpoints: Folder, marker: Marker, paths: list[str] | None = None) -> str | None:
    """First fault in the files (only `paths`, if given) of a committed checkpoint, or None.

    An `UnreadableStorage` if the storage cannot deliver a file that may exist.
    """
    for path in marker.files if paths is None else paths:
        seal = marker.files[path]
        file_fault = sealing.fault(checkpoints, f"{marker.name}/{path}", seal.size_bytes, seal.sha256, path)
        if file_fault is not None:
            return file_fault
    return None


def seal(content: bytes) -> FileSeal:
    """Seal of a file's content."""
    return FileSeal(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
