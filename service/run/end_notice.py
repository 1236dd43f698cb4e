"""Notice that this pod is about to end, left on its disk by the hook that the kubelet runs first.

Workers and drivers of the pod look for it before every step: the run commits a checkpoint and ends, without the control
plane.
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
    """Path of the notice; processes of other containers and users have others."""
    return temp_folder() / f"shardyard-end-notice-{os.getuid()}"


def give_notice() -> None:
    """Leave the notice. Raises OSError."""
    notice_path().touch(mode=0o600)


def has_notice() -> bool:
    """Whether this user left the notice, and not long ago."""
    with suppress(OSError):
        status = os.lstat(notice_path())
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        return is_ours and abs(time.time() - status.st_mtime) < MAX_AGE_S
    return False
