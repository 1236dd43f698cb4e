"""Paths relative to a home folder."""

import errno
from pathlib import Path


def expand_home(path: Path | str) -> Path:
    """Path with a leading `~` or `~user` expanded.

    Raises FileNotFoundError if there is no such home, as for a UID without a user database entry.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        reason = "there is no such home folder; use the absolute path, or set HOME"
        raise FileNotFoundError(errno.ENOENT, reason, str(path)) from None
