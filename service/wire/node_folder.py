"""Private folders on a node's own disk: made with their mode, and given it again after whatever happened to them.

Temporary folders are cleared by others, remade by whoever comes first, and may be full or read-only. A folder of ours
is trusted only if it is a real directory, belongs to this user and is closed to all others.
"""

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

PRIVATE = 0o700
LONGEST_TEMP_FOLDER = 70
"""An AF_UNIX path holds 107 bytes; multiprocessing's sockets lie 32 bytes below."""
NUM_SPOOLS = 10
"""Names that are tried for the spool of a user where others hold the first."""


def temp_folder() -> Path:
    """The folder for temporary files, short enough for the sockets that are made in it: of Ray, below a folder of its
    session, and of Python's multiprocessing. `/tmp` where `TMPDIR` is longer."""
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) <= LONGEST_TEMP_FOLDER else "/tmp")


def spool_bases() -> list[Path]:
    """Folders that may hold this user's spools on this node, in the order in which they are tried."""
    first = temp_folder() / f"shardyard-spool-{os.getuid()}"
    return [first, *(first.with_name(f"{first.name}.{number}") for number in range(1, NUM_SPOOLS))]


def spool_folder(job_id: str) -> Path:
    """The folder on this node for what one job's processes write, readable by this user only.

    Where no such folder can be made, the path of the first: `make_private` refuses it again, and says why.
    """
    for base in spool_bases():
        try:
            make_private(base.parent, base / job_id)
        except OSError:
            continue
        return base / job_id
    return spool_bases()[0] / job_id


def make_private(top: Path, folder: Path) -> None:
    """Make each folder below `top` down to `folder`, and close to others those that are open to them.

    Raises OSError where that cannot be done: PermissionError for what belongs to somebody else, NotADirectoryError for
    a link or a file.
    """
    folder_so_far = top
    top.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    for name in folder.relative_to(top).parts:
        folder_so_far /= name
        _make_one(folder_so_far)


def _make_one(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=PRIVATE)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(
            errno.ENOTDIR, "must be a folder, not a link or a file; remove it", str(folder)
        )
    if status.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, f"must belong to user {os.getuid()}; remove it", str(folder))
    if stat.S_IMODE(status.st_mode) != PRIVATE:
        folder.chmod(PRIVATE)
