"""Storage roots that had no room for what was to be written there, until they have it again."""

import os
import secrets
import tempfile
import threading
from dataclasses import dataclass
from math import inf
from time import monotonic

from moe.train.folder import Folder
from service.errors import Full
from service.lifecycle.roots import StorageRoots

AGAIN_S = 2.0
"""At least between two times that the roots are asked."""
_BLOCK_BYTES = 1 << 16
"""Written to see whether that can be done; a quota, for one, is told by nothing else."""


@dataclass(frozen=True)
class _Refusal:
    fault: Full
    num_bytes: int


class FullRoots:
    """The roots that refused something, each with what it was."""

    def __init__(self, roots: StorageRoots) -> None:
        self._roots = roots
        self._refusals: dict[str, _Refusal] = {}
        self._asking = threading.Lock()
        self._asked_at = -inf

    @property
    def fault(self) -> Full | None:
        """Why something could not be written, as far as is known; None where all that was refused has room."""
        refusals = [*self._refusals.values()]
        return Full("; ".join(refusal.fault.detail for refusal in refusals)) if refusals else None

    def ask_soon(self) -> None:
        """Has the roots asked again in the background, where one that hangs keeps nobody waiting; not too often."""
        due = self._refusals and monotonic() - self._asked_at > AGAIN_S
        if due and self._asking.acquire(blocking=False):
            threading.Thread(target=self._ask, name="full-roots", daemon=True).start()

    def refused(self, storage: str, fault: Full, num_bytes: int) -> None:
        """Notes that there was no room for so many bytes of a job."""
        if (root := self._root(storage)) is not None:
            self._refusals[root] = _Refusal(fault, num_bytes)

    def took(self, storage: str, num_bytes: int) -> None:
        """Notes that there was."""
        root = self._root(storage)
        refusal = self._refusals.get(root or "")
        if root is not None and refusal is not None and refusal.num_bytes <= max(num_bytes, _BLOCK_BYTES):
            self._forget(root, refusal)

    def ask_again(self) -> None:
        """Forgets those that have room for what they refused."""
        for root, refusal in [*self._refusals.items()]:
            try:
                has_room = _has_room(root, refusal.num_bytes)
            except Exception:  # of any kind of storage: nothing new is known
                continue
            if has_room:
                self._forget(root, refusal)

    def _ask(self) -> None:
        try:
            self.ask_again()
        finally:
            self._asked_at = monotonic()
            self._asking.release()

    def _root(self, storage: str) -> str | None:
        found = self._roots.find(storage)
        return None if found is None else found[0]

    def _forget(self, root: str, refusal: _Refusal) -> None:
        if self._refusals.get(root) is refusal:  # and not of one that came meanwhile
            self._refusals.pop(root, None)


def _has_room(root: str, num_bytes: int) -> bool:
    """Raises OSError, also where a block cannot be written."""
    if "://" in root:
        folder, name = Folder(root), f".room-{secrets.token_hex(8)}"
        try:
            folder.write(name, bytes(_BLOCK_BYTES))
        finally:
            folder.remove(name)
        return True
    with tempfile.TemporaryFile(dir=root) as file:
        file.write(bytes(_BLOCK_BYTES))
        file.flush()
        os.fsync(file.fileno())
    there = os.statvfs(root)
    return there.f_bavail * there.f_frsize >= num_bytes
