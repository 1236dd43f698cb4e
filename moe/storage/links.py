"""Bounded resolution of symbolic links; crafted links can make `os.path.realpath` arbitrarily slow."""

import errno
import os
from collections.abc import Callable

MAX_LINKS = 40
"""Maximum links on a path, as in the kernel."""
MAX_CHARACTERS = 4096
"""Maximum path length, as in the kernel."""
MAX_PARTS = 64
"""Maximum depth of a path: each component makes resolving the next more expensive."""
MAX_LINK_PARTS = 4096
"""Maximum total components of all links on a path."""


def follow_links(path: str, base: str = "/", step: Callable[[], None] = lambda: None) -> str:
    """Absolute path with all links followed; it need not exist.

    Relative paths start in `base`, a path without links. `step` is called for each component of a link, and may raise.
    Raises OSError, with the path resolved so far, beyond the limits above.
    """
    real = "" if path.startswith("/") else base.rstrip("/")
    remaining = _parts(path)
    num_links = num_link_parts = 0
    num_link_parts_remaining = 0  # components of `remaining` that came from links, which are popped first
    while remaining:
        part = remaining.pop()
        if num_link_parts_remaining:
            num_link_parts_remaining -= 1
            step()
        if part in ("", "."):
            continue
        if part == "..":
            real = real.rpartition("/")[0]
            continue
        next_path = f"{real}/{part}"
        if len(next_path) > MAX_CHARACTERS:
            raise OSError(errno.ENAMETOOLONG, f"leads to a path of more than {MAX_CHARACTERS} characters", next_path)
        if next_path.count("/") > MAX_PARTS:
            raise OSError(errno.ENAMETOOLONG, f"is more than {MAX_PARTS} folders deep", next_path)
        try:
            target = os.readlink(next_path)
        except OSError:  # no link, or missing
            real = next_path
            continue
        num_links += 1
        if num_links > MAX_LINKS:
            raise OSError(errno.ELOOP, f"leads through more than {MAX_LINKS} links", next_path)
        if target.startswith("/"):
            real = ""
        parts = _parts(target)
        num_link_parts += len(parts)
        if num_link_parts > MAX_LINK_PARTS:
            raise OSError(errno.ELOOP, f"leads through links of more than {MAX_LINK_PARTS:,} parts together", next_path)
        remaining += parts
        num_link_parts_remaining += len(parts)
    return real or "/"


def _parts(path: str) -> list[str]:
    """Path components, last first."""
    return path.split("/")[::-1]
