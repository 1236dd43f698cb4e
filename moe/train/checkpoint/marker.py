"""The atomic marker of a checkpoint: it alone says that one is whole, and which is the newest."""

import hashlib
import json
import re
from typing import Any, Literal

from pydantic import ValidationError

from moe.spec.base import Count, CountOrZero, Frozen
from moe.storage import sealing
from moe.storage.folder import Folder

FOLDER = "checkpoints"
"""Folder in a job's storage with its checkpoints and their markers."""
SUFFIX = ".commit.json"
_NAME = re.compile(r"step-(\d{8,})\.a(\d+)\.g(\d+)")
MAX_BYTES = 1 << 24
"""Bound on a marker's bytes: more than a marker of a hundred thousand files has."""


class FileSeal(Frozen):
    """Length of one file of a checkpoint, and the SHA-256 of its bytes."""

    size_bytes: CountOrZero
    sha256: str


class Marker(Frozen):
    """Says that a checkpoint is committed, and what every file of it must be.

    A run resumes from the newest whose files are as it says: the most steps, then the latest attempt, then
    the latest worker group.
    """

    version: Literal[1] = 1
    step: CountOrZero
    """Finished steps; the next batch is the one of this number."""
    attempt: CountOrZero
    group: CountOrZero
    num_workers: Count
    created_at: str
    files: dict[str, FileSeal]
    """Seals by path, relative to the checkpoint's folder."""

    @property
    def name(self) -> str:
        """The folder's name under `checkpoints/`."""
        return name_of(self.step, self.attempt, self.group)

    @property
    def size_bytes(self) -> int:
        return sum(seal.size_bytes for seal in self.files.values())

    def to_bytes(self) -> bytes:
        body = self.model_dump(mode="json")
        return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Marker":
        """The marker these bytes hold. Raises ValueError, saying how, where they are torn or altered."""
        if len(content) > MAX_BYTES:
            raise ValueError(f"its marker has more than {MAX_BYTES:,} bytes")
        try:
            body: dict[str, Any] = json.loads(content)
            digest = body.pop("sha256")
            marker = cls.model_validate(body)
        except (ValueError, KeyError, AttributeError, TypeError, ValidationError, RecursionError) as error:
            raise ValueError("its marker is torn") from error
        if digest != _digest(body):
            raise ValueError("its marker was altered")
        return marker


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def name_of(step: int, attempt: int, group: int) -> str:
    """A checkpoint's name: every attempt and worker group writes under names of its own."""
    return f"step-{step:08d}.a{attempt}.g{group}"


def order(name: str) -> tuple[int, int, int] | None:
    """(step, attempt, group) that a checkpoint's folder name says; None where it is no such name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def is_copy(name: str) -> bool:
    """Whether a checkpoint was copied from another job: it counts as written before the first attempt."""
    return (order(name) or (0, 1, 0))[1] == 0


def list_committed(checkpoints: Folder) -> list[str]:
    """Names of the checkpoints that have a marker, newest first; whether they are whole is not yet known."""
    names = [name.removesuffix(SUFFIX) for name in checkpoints.names() if name.endswith(SUFFIX)]
    return sorted((name for name in names if order(name)), key=lambda name: order(name) or (), reverse=True)


def read(checkpoints: Folder, name: str) -> Marker:
    """The marker of one checkpoint. Raises ValueError where it is torn, altered or another's."""
    marker = Marker.from_bytes(checkpoints.read(name + SUFFIX, 0, MAX_BYTES + 1))
    if marker.name != name:
        raise ValueError(f"its marker is that of {marker.name}")
    return marker


def fault(checkpoints: Folder, marker: Marker, paths: list[str] | None = None) -> str | None:
    """Fault of the files of a committed checkpoint, or None. `paths` limits what is looked at.

    `Unreadable` where the storage does not give a file that may be there.
    """
    for path in marker.files if paths is None else paths:
        seal = marker.files[path]
        file_fault = sealing.fault(checkpoints, f"{marker.name}/{path}", seal.size_bytes, seal.sha256, path)
        if file_fault is not None:
            return file_fault
    return None


def seal(content: bytes) -> FileSeal:
    """The seal of a small file at hand."""
    return FileSeal(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
