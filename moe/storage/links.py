"""Symbolic links, followed by a walk that ends: `os.path.realpath` costs as much as whoever made them likes."""

import errno
import os
from collections.abc import Callable

MAX_LINKS = 40
"""Links on the way to one file, as for the kernel."""
MAX_CHARACTERS = 4096
"""Length of a path on the way, likewise."""
MAX_PARTS = 64
"""Depth of a path on the way: each part makes looking at the next dearer."""
MAX_LINK_PARTS = 4096
"""Parts of all links on the way together: each is looked at."""


def follow_links(path: str, below: str = "/", step: Callable[[], None] = lambda: None) -> str:
    """The absolute path with every link followed, also of what is not there. A relative one begins in `below`, a path
    without links.

    `step` is called for each part of a link, and may raise. Raises OSError, with the path so far, where there are more
    links, or the path becomes longer, than the kernel would take, or either has too many parts.
    """
    real = "" if path.startswith("/") else below.rstrip("/")
    left = _parts(path)
    num_links = num_link_parts = 0
    num_link_parts_left = 0  # of the parts that are left: those that links have said, which come first
    while left:
        part = left.pop()
        if num_link_parts_left:
            num_link_parts_left -= 1
            step()
        if part in ("", "."):
            continue
        if part == "..":
            real = real.rpartition("/")[0]
            continue
        next_path = f"{real}/{part}"
        if len(next_path) > MAX_CHARACTERS:
            raise OSError(
                errno.ENAMETOOLONG, f"leads to a path of more than {MAX_CHARACTERS} characters", next_path
            )
        if next_path.count("/") > MAX_PARTS:
            raise OSError(errno.ENAMETOOLONG, f"lies more than {MAX_PARTS} folders deep", next_path)
        try:
            target = os.readlink(next_path)
        except OSError:  # no link, or not there
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
            raise OSError(
                errno.ELOOP, f"leads through links of more than {MAX_LINK_PARTS:,} parts together", next_path
            )
        left += parts
        num_link_parts_left += len(parts)
    return real or "/"


def _parts(path: str) -> list[str]:
    """The last first."""
    return path.split("/")[::-1]
