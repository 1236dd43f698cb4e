"""Paths that begin with a user's home folder."""

import errno
from pathlib import Path


def expand_home(path: Path | str) -> Path:
    """The path with `~` or `~user` replaced by that home folder.

    Raises FileNotFoundError where there is none, as for a UID without an entry in the list of users.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        why = "there is no such home folder; name the folder by its whole path, or set HOME"
        raise FileNotFoundError(errno.ENOENT, why, str(path)) from None
