"""Notice that this pod is about to end, left on its disk by the pod's preStop hook.

Workers and drivers in the pod look for it before every step; the run then commits a checkpoint and ends, without the
control plane. A pod's disk outlives its containers, so a notice counts only for the container that it was left in.
"""

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from service.wire.node_folder import temp_folder

MAX_AGE_S = 3600.0
"""Age at which a notice is a forgotten one."""


def notice_path() -> Path:
    """Path of the notice, for this container and user."""
    return temp_folder() / f"shardyard-end-notice-{os.getuid()}"


def give_notice() -> None:
    """Leave the notice. Raises OSError."""
    notice = os.open(notice_path(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(notice, "w") as file:
        file.write(_container_start())


def has_notice() -> bool:
    """Whether this user has left a recent notice in this container."""
    with suppress(OSError, UnicodeDecodeError):
        status = os.lstat(notice_path())
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        is_fresh = abs(time.time() - status.st_mtime) < MAX_AGE_S
        return is_ours and is_fresh and notice_path().read_text() == _container_start()
    return False


def _container_start() -> str:
    """Start of the container's first process, in clock ticks since the node's; "" where that cannot be read."""
    with suppress(OSError):
        return Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]
    return ""
