"""Folder of a process's windows on the local disk, locked while the process lives."""

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path


class WindowFolder:
    """Names new folders for windows. Removes what killed processes left beside it."""

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        for lock in parent.glob("*.lock"):
            _remove_if_dead(lock)
        self._path = parent / f"{os.getpid()}-{time.time_ns()}"
        self._lock_path = self._path.with_suffix(".lock")
        self._lock = _locked(self._lock_path)
        self._path.mkdir()
        self._num = 0

    def new(self) -> Path:
        """A folder that does not exist yet."""
        self._num += 1
        return self._path / str(self._num)

    def discard(self, folder: Path) -> None:
        """Remove a window's files. Memory maps of them stay valid."""
        shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)


def _locked(path: Path) -> int:
    """Descriptor of a new file with a lock, which the kernel releases when the process dies."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):  # another process removed it before it was locked
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


def _remove_if_dead(lock: Path) -> None:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
