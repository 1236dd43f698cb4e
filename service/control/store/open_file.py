"""Checks whether the files at a SQLite database's path are still the open ones.

SQLite continues to write to a moved or removed file, and those commits are lost. The check uses `stat`: opening and
closing a file would drop this process's locks.
"""

from pathlib import Path

from service.control.errors import Unavailable

Identity = tuple[int, int]
"""Device and inode."""


class OpenFile:
    """Database file at a path, and its write-ahead log once it exists."""

    def __init__(self, path: str) -> None:
        """Raises OSError if the file does not exist."""
        self._path = Path(path)
        self._log = Path(f"{path}-wal")
        self._identity_at_open = _identity(self._path)
        self._opened_log: Identity | None = None

    def fault(self) -> Unavailable | None:
        """Reason why the database must not be used; None if the files are the open ones."""
        try:
            if _identity(self._path) != self._identity_at_open:
                return self._missing_error(self._path, "was replaced by another file")
        except OSError as error:
            return self._missing_error(self._path, f"is gone ({error.strerror})")
        try:
            log = _identity(self._log)
        except FileNotFoundError:
            log = None
        except OSError as error:
            return self._missing_error(self._log, f"is inaccessible ({error.strerror})")
        if self._opened_log is None:
            self._opened_log = log
        elif log != self._opened_log:
            return self._missing_error(self._log, "was removed or replaced")
        return None

    def _missing_error(self, path: Path, fate: str) -> Unavailable:
        return Unavailable(
            f"the database file {path} {fate} while in use, so requests that write are refused; "
            "move it back, or restart the service, which opens the file at the path and, if that "
            "holds no jobs, recovers them from storage",
            headers={"retry-after": "5"},
        )


def _identity(path: Path) -> Identity:
    status = path.stat()
    return status.st_dev, status.st_ino
