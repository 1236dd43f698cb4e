"""`sweep.json` in a member's folder: its sweep and its number in it, to restore a lost database."""

from typing import Any, Literal

from pydantic import ValidationError

from moe.spec.base import Frozen
from moe.storage.folder import Folder

NAME = "sweep.json"
MAX_BYTES = 1 << 24


class MemberFile(Frozen):
    """A member's copy of its sweep."""

    version: Literal[1] = 1
    sweep_id: str
    sweep_name: str
    metric: str
    rungs: tuple[int, ...]
    body: dict[str, Any]
    """Posted body of the sweep."""
    created_at_us: int
    number: int
    """Number of the member, from 1."""
    values: dict[str, Any]

    def write(self, folder: Folder) -> None:
        """Raises OSError."""
        folder.write(NAME, self.model_dump_json().encode())


def read_member_file(folder: Folder) -> MemberFile | None:
    """The file in a job's folder; None for a job of no sweep, and for a file of a newer release. Raises OSError."""
    try:
        return MemberFile.model_validate_json(folder.read(NAME, max_bytes=MAX_BYTES))
    except (FileNotFoundError, ValidationError):
        return None
