"""Opens, creates and removes what lies beneath a folder, and nothing else, whatever is swapped for a link meanwhile.

It is opened part by part from a handle of the folder, and no part may be a link. Where one is, links are followed by
name, and where that leads out of the folder it ends; what it leads to is opened in the same way, so that a part that
has become a link since is an error, not a way out. What is created or removed follows no link at all.
"""

import errno
import io
import math
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from moe.storage.links import follow_links

_HANDLE = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_AT_A_LINK = (errno.ELOOP, errno.ENOTDIR)
"""Errors of an opening that follows no link where it meets one; the second, as at a file where a folder was meant."""

_TRIES = 10
"""Attempts to make a folder that others remove while it is empty."""

_DEEPEST = 64
"""Levels of folders that are removed with what lies in them: runs make four."""


class Outside(PermissionError):
    """A path that leads out of the folder, by itself or by a link."""


def follow(folder: str, path: str) -> str:
    """The absolute path with every link followed, also of what is not there. Raises OSError, Outside among them."""
    real = follow_links(path if os.path.isabs(path) else os.path.join(os.getcwd(), path))
    if contains(os.path.realpath(folder), real):
        return real
    raise Outside(errno.EACCES, f"lies outside {folder}", path)


def contains(folder: str, path: str) -> bool:
    """Whether a path lies in a folder or is it, both without links."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def open_file(folder: str, path: str, *, links: bool = True) -> io.BufferedReader:
    """A regular file beneath the folder, open for reading, without `links` by none below the folder. Raises OSError,
    Outside among them."""
    # Without waiting: a pipe would have whoever opens it wait for its other end.
    descriptor = _open(folder, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, links)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder", path)
        raise OSError(errno.EINVAL, "is not a regular file", path)
    return os.fdopen(descriptor, "rb")


@contextmanager
def listing(folder: str, path: str, *, links: bool = True) -> Iterator[Iterator[os.DirEntry[str]]]:
    """Entries of a folder beneath the folder, or of itself, as it is read; `links` as in `open_file`. Raises OSError,
    Outside among them."""
    descriptor = _open(folder, path, _FOLDER, links)
    try:
        with os.scandir(descriptor) as entries:
            yield entries
    finally:
        os.close(descriptor)


def sizes(folder: str, path: str, *, links: bool = True) -> dict[str, int]:
    """Bytes of what lies in a folder beneath the folder, by name: neither links nor what is renamed or removed while it
    is looked at. `links` as in `open_file`. Raises OSError, Outside among them."""
    size_by_name = {}
    with listing(folder, path, links=links) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if not entry.is_symlink():
                    size_by_name[entry.name] = entry.stat(follow_symlinks=False).st_size
    return size_by_name


@contextmanager
def create(folder: str, path: str, mode: int = 0o666) -> Iterator[io.BufferedWriter]:
    """A new file beneath the folder, to be written. It takes its name, in place of what has it, when this ends without
    an error: whole and durable by then. Folders on the way are made.

    Until then it has a name that nobody can guess. No link below the folder is followed; one that has the name is
    replaced. Raises OSError, Outside among them.
    """
    below = os.path.relpath(path, folder)
    if _climbs(path, below):
        raise Outside(errno.EACCES, f"lies outside {folder}", path)
    *folders, name = below.split("/")
    handle = _make_folder(folder, folders)
    try:
        draft = f".{secrets.token_hex(8)}.draft"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(draft, flags, mode, dir_fd=handle)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            os.replace(draft, name, src_dir_fd=handle, dst_dir_fd=handle)
        except BaseException:
            with suppress(OSError):  # what happened before is what matters
                os.unlink(draft, dir_fd=handle)
            raise
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: str, path: str) -> None:
    """Makes a folder beneath the folder, those on the way, and the folder itself, where they are not there; follows no
    link. Raises OSError, Outside among them."""
    below = os.path.relpath(path, folder)
    if _climbs(path, below):
        raise Outside(errno.EACCES, f"lies outside {folder}", path)
    os.close(_make_folder(folder, below.split("/")))


def remove(folder: str, path: str) -> None:
    """Removes a file beneath the folder, or a folder (also itself) with all that lies in it. No link is followed: the
    last part may be one, and goes itself. Raises OSError, Outside and FileNotFoundError among them."""
    below = os.path.relpath(path, folder)
    if below == ".":
        folder, below = os.path.split(os.path.abspath(folder))
    if _climbs(path, below):
        raise Outside(errno.EACCES, f"lies outside {folder}", path)
    parents, _, name = below.rpartition("/")
    parent = _walk(folder, parents or ".", _FOLDER)
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            with open_folder(parent, name) as handle:
                remove_entries(handle)
            os.rmdir(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)
    finally:
        os.close(parent)


def remove_entries(handle: int, until: float = math.inf, depth: int = 0) -> bool:
    """Removes what lies in a folder, links themselves; False when it was that time of the monotonic clock before all
    was gone. At least one is removed. Raises OSError."""
    if depth > _DEEPEST:
        raise OSError(errno.ELOOP, f"its folders lie more than {_DEEPEST} levels deep")
    for name, is_folder in entries_of(handle):
        with suppress(FileNotFoundError):  # another was quicker
            if is_folder:
                with open_folder(handle, name) as below:
                    if not remove_entries(below, until, depth + 1):
                        return False
                os.rmdir(name, dir_fd=handle)
            else:
                os.unlink(name, dir_fd=handle)
        if monotonic() > until:
            return False
    return True


def entries_of(handle: int) -> list[tuple[str, bool]]:
    """Names of what lies in a folder, and which are folders; a link to one is none."""
    with os.scandir(handle) as scan:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan]


@contextmanager
def open_folder(parent: int, name: str) -> Iterator[int]:
    """The handle of a folder in another. Raises OSError, also for a link."""
    handle = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield handle
    finally:
        os.close(handle)


def _make_folder(folder: str, names: list[str]) -> int:
    """The handle of a folder by the names that lead to it; each is made if it is not there, again where another removes
    it meanwhile."""
    os.makedirs(folder, exist_ok=True)
    for left in reversed(range(_TRIES)):
        handle = os.open(folder, _FOLDER)
        try:
            for name in names:
                above, handle = handle, _enter_folder(handle, name)
                os.close(above)
            return handle
        except OSError as error:
            os.close(handle)
            if not isinstance(error, FileNotFoundError) or not left:
                raise
    raise AssertionError("the last try returns or raises")


def _enter_folder(parent: int, name: str) -> int:
    """The handle of a folder in another, made if it is not there."""
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another was quicker
            os.mkdir(name, dir_fd=parent)
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)


def _climbs(path: str, below: str) -> bool:
    return ".." in (*path.split("/"), *below.split("/"))


def _open(folder: str, path: str, flags: int, links: bool) -> int:
    below = os.path.relpath(path, folder)
    climbs = _climbs(path, below)
    if climbs and not links:
        raise Outside(errno.EACCES, f"lies outside {folder}", path)
    if not climbs:
        try:
            return _walk(folder, below, flags)
        except OSError as error:
            if not links or error.errno not in _AT_A_LINK:
                raise
    root = os.path.realpath(folder)
    return _walk(root, os.path.relpath(follow(root, path), root), flags)


def _walk(folder: str, below: str, flags: int) -> int:
    """The descriptor of what lies there, without following a link below the folder. Raises OSError."""
    *folders, last = below.split("/")
    handle = os.open(folder, _HANDLE)
    try:
        for name in folders:
            above, handle = handle, os.open(name, _HANDLE | os.O_NOFOLLOW, dir_fd=handle)
            os.close(above)
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
    finally:
        os.close(handle)
