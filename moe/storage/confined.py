"""Opens, creates and removes files strictly inside a folder, safely under concurrent symlink swaps.

Paths are opened component by component from a handle of the folder (`openat`), without following links. If a component
is a link, the path is resolved by name, must stay in the folder, and is reopened in the same way: if a component is
swapped for a link in the meantime, opening fails instead of escaping. Creation and removal follow no links.
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
"""Errors of opening a link without following it; ENOTDIR also means a file in place of a folder."""

_TRIES = 10
"""Attempts to create folders that other processes may remove while they are empty."""

_DEEPEST = 64
"""Maximum depth of folders to remove recursively; runs create four levels."""


class Outside(PermissionError):
    """Path that leads out of the folder, by itself or through a link."""


def follow(folder: str, path: str) -> str:
    """Absolute path with all links followed; it need not exist. Raises OSError, including Outside."""
    real = follow_links(path if os.path.isabs(path) else os.path.join(os.getcwd(), path))
    if contains(os.path.realpath(folder), real):
        return real
    raise Outside(errno.EACCES, f"is outside {folder}", path)


def contains(folder: str, path: str) -> bool:
    """Whether `path` is `folder` or is in it, both without links."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def open_file(folder: str, path: str, *, links: bool = True) -> io.BufferedReader:
    """Open a regular file in the folder for reading. Without `links`, follow no links below the folder.

    Raises OSError, including Outside.
    """
    # Non-blocking: opening a pipe would wait for its other end.
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
    """Entries of `folder` or of a folder inside it; `links` as in `open_file`.

    Raises OSError, including Outside.
    """
    descriptor = _open(folder, path, _FOLDER, links)
    try:
        with os.scandir(descriptor) as entries:
            yield entries
    finally:
        os.close(descriptor)


def sizes(folder: str, path: str, *, links: bool = True) -> dict[str, int]:
    """Bytes of the entries of `folder` or of a folder inside it, by name; `links` as in `open_file`.

    Omits links, and entries renamed or removed in the meantime. Raises OSError, including Outside.
    """
    size_by_name = {}
    with listing(folder, path, links=links) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if not entry.is_symlink():
                    size_by_name[entry.name] = entry.stat(follow_symlinks=False).st_size
    return size_by_name


@contextmanager
def create(folder: str, path: str, mode: int = 0o666) -> Iterator[io.BufferedWriter]:
    """Create a file in the folder atomically: it gets its name, complete and durable, if the block succeeds.

    Until then it has an unguessable name. Replaces an existing file or link, creates missing folders, follows no link
    below the folder. Raises OSError, including Outside.
    """
    relative_path = os.path.relpath(path, folder)
    if _climbs(path, relative_path):
        raise Outside(errno.EACCES, f"is outside {folder}", path)
    *folders, name = relative_path.split("/")
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
            with suppress(OSError):  # the first error is the one to report
                os.unlink(draft, dir_fd=handle)
            raise
        os.fsync(handle)
    finally:
        os.close(handle)


def create_first(folder: str, path: str, content: bytes) -> bool:
    """Create a file in the folder unless the name is taken, also by a link; return whether it was created.

    Of several processes one succeeds, also on NFS. Creates missing folders. Raises OSError, including Outside.
    """
    relative_path = os.path.relpath(path, folder)
    if _climbs(path, relative_path):
        raise Outside(errno.EACCES, f"is outside {folder}", path)
    *folders, name = relative_path.split("/")
    handle = _make_folder(folder, folders)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=handle)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.fsync(handle)
        return True
    except FileExistsError:
        return False
    finally:
        os.close(handle)


def link(folder: str, source: str, target: str) -> None:
    """Give a file in the folder another name there, unless that is taken; creates missing folders, follows no links.

    Raises OSError, including Outside.
    """
    handles = []
    try:
        for path in (source, target):
            relative_path = os.path.relpath(path, folder)
            if _climbs(path, relative_path):
                raise Outside(errno.EACCES, f"is outside {folder}", path)
            handles.append(_make_folder(folder, relative_path.split("/")[:-1]))
        with suppress(FileExistsError):
            os.link(
                os.path.basename(source), os.path.basename(target),
                src_dir_fd=handles[0], dst_dir_fd=handles[1], follow_symlinks=False,
            )  # fmt: skip
        os.fsync(handles[1])
    finally:
        for handle in handles:
            os.close(handle)


def make_folder(folder: str, path: str) -> None:
    """Create a folder inside `folder`, or `folder` itself, with missing parents; follows no links.

    Raises OSError, including Outside.
    """
    relative_path = os.path.relpath(path, folder)
    if _climbs(path, relative_path):
        raise Outside(errno.EACCES, f"is outside {folder}", path)
    os.close(_make_folder(folder, relative_path.split("/")))


def remove(folder: str, path: str) -> None:
    """Remove a file or folder (recursively) inside `folder`, or `folder` itself, without following links.

    If the last component is a link, the link is removed. Raises OSError, including Outside and FileNotFoundError.
    """
    relative_path = os.path.relpath(path, folder)
    if relative_path == ".":
        folder, relative_path = os.path.split(os.path.abspath(folder))
    if _climbs(path, relative_path):
        raise Outside(errno.EACCES, f"is outside {folder}", path)
    parents, _, name = relative_path.rpartition("/")
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
    """Remove the entries of a folder, at least one, until the monotonic time `until`; links are removed, not followed.

    Returns whether all are gone. Raises OSError.
    """
    if depth > _DEEPEST:
        raise OSError(errno.ELOOP, f"its folders are more than {_DEEPEST} levels deep")
    for name, is_folder in entries_of(handle):
        with suppress(FileNotFoundError):  # removed by another process
            if is_folder:
                with open_folder(handle, name) as child:
                    if not remove_entries(child, until, depth + 1):
                        return False
                os.rmdir(name, dir_fd=handle)
            else:
                os.unlink(name, dir_fd=handle)
        if monotonic() > until:
            return False
    return True


def entries_of(handle: int) -> list[tuple[str, bool]]:
    """(name, is a folder) of a folder's entries; links are not folders."""
    with os.scandir(handle) as scan:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan]


@contextmanager
def open_folder(parent: int, name: str) -> Iterator[int]:
    """Handle of a folder in another. Raises OSError, also for a link."""
    handle = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield handle
    finally:
        os.close(handle)


def _make_folder(folder: str, names: list[str]) -> int:
    """Handle of a folder; creates missing folders on the path `names`, again if other processes remove them
    meanwhile."""
    os.makedirs(folder, exist_ok=True)
    for left in reversed(range(_TRIES)):
        handle = os.open(folder, _FOLDER)
        try:
            for name in names:
                parent_handle, handle = handle, _enter_folder(handle, name)
                os.close(parent_handle)
            return handle
        except OSError as error:
            os.close(handle)
            if not isinstance(error, FileNotFoundError) or not left:
                raise
    raise AssertionError("the last try returns or raises")


def _enter_folder(parent: int, name: str) -> int:
    """Handle of a folder in another, created if missing."""
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        with suppress(FileExistsError):  # created by another process
            os.mkdir(name, dir_fd=parent)
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)


def _climbs(path: str, relative_path: str) -> bool:
    return ".." in (*path.split("/"), *relative_path.split("/"))


def _open(folder: str, path: str, flags: int, links: bool) -> int:
    relative_path = os.path.relpath(path, folder)
    climbs = _climbs(path, relative_path)
    if climbs and not links:
        raise Outside(errno.EACCES, f"is outside {folder}", path)
    if not climbs:
        try:
            return _walk(folder, relative_path, flags)
        except OSError as error:
            if not links or error.errno not in _AT_A_LINK:
                raise
    root = os.path.realpath(folder)
    return _walk(root, os.path.relpath(follow(root, path), root), flags)


def _walk(folder: str, relative_path: str, flags: int) -> int:
    """Descriptor of a path, opened without following links below the folder. Raises OSError."""
    *folders, last = relative_path.split("/")
    handle = os.open(folder, _HANDLE)
    try:
        for name in folders:
            parent_handle, handle = handle, os.open(name, _HANDLE | os.O_NOFOLLOW, dir_fd=handle)
            os.close(parent_handle)
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
    finally:
        os.close(handle)
