"""Private folders on a node's local disk, with their mode restored at each use.

Temporary folders may be cleared, recreated by other users, full or read-only. Trusted are only real directories of
this user, closed to all others.
"""

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

PRIVATE = 0o700
LONGEST_TEMP_FOLDER = 70
"""AF_UNIX paths hold 107 bytes; multiprocessing's are 32 bytes longer."""
NUM_SPOOLS = 10
"""Names tried for a user's spool if others own the first."""


def temp_folder() -> Path:
    """Folder for temporary files, short enough for sockets of Ray and multiprocessing: `/tmp` if `TMPDIR` is longer."""
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) <= LONGEST_TEMP_FOLDER else "/tmp")


def spool_bases() -> list[Path]:
    """Candidate folders for this user's spools, in order."""
    first = temp_folder() / f"shardyard-spool-{os.getuid()}"
    return [first, *(first.with_name(f"{first.name}.{number}") for number in range(1, NUM_SPOOLS))]


def spool_folder(job_id: str) -> Path:
    """Private folder of a job's spools on this node. If none can be made, the first, on which `make_private` fails
    again."""
    for base in spool_bases():
        try:
            make_private(base.parent, base / job_id)
        except OSError:
            continue
        return base / job_id
    return spool_bases()[0] / job_id


def make_private(top: Path, folder: Path) -> None:
    """Make each folder below `top`, down to `folder`, and make it private.

    Raises OSError: PermissionError for another user's folder, NotADirectoryError for a link or a file.
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
        raise NotADirectoryError(errno.ENOTDIR, "must be a folder, not a link or a file; remove it", str(folder))
    if status.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, f"must belong to user {os.getuid()}; remove it", str(folder))
    if stat.S_IMODE(status.st_mode) != PRIVATE:
        folder.chmod(PRIVATE)
