"""Storage roots that were full at a write, until they have room again."""

import os
import secrets
import shutil
import tempfile
import threading
from dataclasses import dataclass, replace
from math import inf
from time import monotonic

from moe.storage.folder import Folder
from service.control.errors import Full
from service.control.jobs.roots import StorageRoots

RETRY_INTERVAL_S = 2.0
"""Shortest interval between checks of the roots."""
_BLOCK_BYTES = 1 << 16
"""Size of a test write, the only way to detect a quota."""


@dataclass(frozen=True)
class _Refusal:
    fault: Full
    num_bytes: int


class FullRoots:
    """Roots that refused a write, with the largest size that was refused."""

    def __init__(self, roots: StorageRoots) -> None:
        self._roots = roots
        self._refusals: dict[str, _Refusal] = {}
        self._lock = threading.Lock()
        """Guards the refusals; never held during a check of a root."""
        self._check_lock = threading.Lock()
        self._checked_at = -inf

    @property
    def fault(self) -> Full | None:
        """Reason why a write failed, as far as known; None if all refused writes would fit now."""
        refusals = [refusal for _, refusal in self._list_refusals()]
        return Full("; ".join(refusal.fault.detail for refusal in refusals)) if refusals else None

    def check_soon(self) -> None:
        """Check the roots again in a background thread, rate-limited."""
        due = self._refusals and monotonic() - self._checked_at > RETRY_INTERVAL_S
        if due and self._check_lock.acquire(blocking=False):
            try:
                threading.Thread(target=self._check, name="full-roots", daemon=True).start()
            except RuntimeError:  # thread limit reached: try later
                self._check_lock.release()

    def record_refusal(self, storage: str, fault: Full, num_bytes: int) -> None:
        """Record that there was no room for `num_bytes` of a job, unless the root can never hold them."""
        if (root := self._root(storage)) is None or num_bytes > _max_bytes(root):
            return
        with self._lock:
            refusal = self._refusals.get(root)
            # Always a new object, so that a check begun before this refusal does not clear it.
            self._refusals[root] = (
                replace(refusal) if refusal and refusal.num_bytes > num_bytes else _Refusal(fault, num_bytes)
            )

    def record_write(self, storage: str, num_bytes: int) -> None:
        """Record a successful write of `num_bytes`."""
        if (root := self._root(storage)) is None:
            return
        with self._lock:
            refusal = self._refusals.get(root)
            if refusal is not None and refusal.num_bytes <= max(num_bytes, _BLOCK_BYTES):
                del self._refusals[root]

    def recheck(self) -> None:
        """Forget the refusals of roots that now have room for them."""
        for root, refusal in self._list_refusals():
            try:
                has_room = _has_room(root, refusal.num_bytes)
            except Exception:  # from any storage backend: nothing new is known
                continue
            if has_room:
                self._forget(root, refusal)

    def _check(self) -> None:
        try:
            self.recheck()
        finally:
            self._checked_at = monotonic()
            self._check_lock.release()

    def _root(self, storage: str) -> str | None:
        location = self._roots.find(storage)
        return None if location is None else location[0]

    def _list_refusals(self) -> list[tuple[str, _Refusal]]:
        with self._lock:
            return [*self._refusals.items()]

    def _forget(self, root: str, refusal: _Refusal) -> None:
        with self._lock:
            if self._refusals.get(root) is refusal:  # not a newer one
                del self._refusals[root]


def _has_room(root: str, num_bytes: int) -> bool:
    """Whether a root has room for `num_bytes`. Raises OSError, also if a block cannot be written."""
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
    return shutil.disk_usage(root).free >= num_bytes


def _max_bytes(root: str) -> float:
    """Bytes that a root could have free; infinite if unknown."""
    try:
        usage = shutil.disk_usage(root)
    except OSError:  # or not a file system
        return inf
    return usage.used + usage.free  # without blocks reserved for the system
