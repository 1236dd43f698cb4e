"""Folders of jobs: only under the operator's storage roots."""

import os
import re
from collections.abc import Sequence
from urllib.parse import unquote

from moe.spec.errors import ProblemCode, SpecError, spec_error
from moe.storage import links
from moe.storage.folder import Folder

_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]*)://(?P<path>.*)", re.DOTALL)
UPLOADS = ".uploads"
"""Folder of uploads in the first root."""
_LOCAL = frozenset({"file", "local"})
_ODD = re.compile(r"[\x00-\x1f\x7f\\?#*\[\]]")


class StorageRoots:
    """The storage roots; jobs that name no storage use the first."""

    def __init__(self, roots: Sequence[str]) -> None:
        if not roots:
            raise ValueError("storage_roots must name at least one folder")
        self._roots = [_split(root) for root in roots]
        for root, (protocol, path) in zip(roots, self._roots, strict=True):
            if protocol == "file" and not os.path.isabs(os.path.expanduser(path)):
                raise ValueError(f"storage_roots (={root!r}) must be absolute paths or URLs")
        self._root_names = tuple(roots)

    def job_folder(self, storage: str | None, job_id: str) -> str:
        """fsspec URL of a new job's folder: below the requested one, so that jobs never share one. Raises SpecError
        for storage outside the roots."""
        base = self._default() if storage is None else self._confine(storage)
        return f"{base.rstrip('/')}/{job_id}"

    def find(self, storage: str) -> tuple[str, ...] | None:
        """Split the URL of a job's folder into its root and the names below it, without accessing storage; None outside
        the configured roots."""
        protocol, path = _split(storage)
        for root_protocol, root in self._roots:
            is_local = root_protocol == "file"
            root_paths = {os.path.expanduser(root), os.path.realpath(os.path.expanduser(root))} if is_local else {root}
            for root_path in sorted(root_paths):
                names = path.removeprefix(root_path.rstrip("/")).strip("/").split("/")
                if protocol == root_protocol and _is_below(path, root_path) and not {"", ".", ".."}.intersection(names):
                    return (root_path if is_local else f"{protocol}://{root_path}", *names)
        return None

    def locations(self) -> list[str]:
        """The roots as URLs and as paths with links resolved, without duplicates."""
        locations = [
            os.path.realpath(os.path.expanduser(path)) if protocol == "file" else f"{protocol}://{path}"
            for protocol, path in self._roots
        ]
        return list(dict.fromkeys(locations))

    @property
    def uploads_url(self) -> str:
        """Folder of uploads."""
        return f"{self._default().rstrip('/')}/{UPLOADS}"

    def folder(self, storage: str) -> Folder:
        """A job's folder. No link is followed between its root (or its parent, if the root is no longer configured) and
        its files."""
        location = self.find(storage)
        return Folder.of_job(storage) if location is None else Folder(storage, root=location[0])

    def _default(self) -> str:
        protocol, path = self._roots[0]
        return os.path.realpath(os.path.expanduser(path)) if protocol == "file" else f"{protocol}://{path}"

    def _confine(self, storage: str) -> str:
        if "::" in storage:
            raise self._problem("invalid_value", storage, "must be one location, not a chain of file systems ('::')")
        if _ODD.search(storage):
            raise self._problem(
                "invalid_value", storage, "must not contain control characters, '\\', '?', '#', '*', '[' or ']'"
            )
        if not storage.isprintable():
            raise self._problem("invalid_value", storage, "must not contain invisible or direction-changing characters")
        protocol, path = _split(storage)
        if ".." in re.split(r"/", path) or ".." in re.split(r"/", unquote(path)):
            raise self._problem("not_allowed", storage, "must not contain '..'")
        if protocol != "file":
            for root_protocol, root in self._roots:
                if protocol == root_protocol and _is_below(path, root):
                    return f"{protocol}://{path}"
            raise self._outside(storage)
        if not os.path.isabs(path):
            raise self._problem("invalid_value", storage, "must be an absolute path or a URL")
        fault = None
        try:
            real = links.follow_links(path)
        except OSError as error:
            real, fault = str(error.filename), str(error.strerror)
        for root_protocol, root in self._roots:
            if root_protocol == "file" and _is_below(real, os.path.realpath(os.path.expanduser(root))):
                if fault is not None:
                    raise self._problem("unreadable", storage, fault)
                return real
        raise self._outside(storage)  # the same answer for any error, to reveal nothing about other folders

    def _outside(self, storage: str) -> SpecError:
        return self._problem("not_allowed", storage, "must be under a storage root of this service")

    def _problem(self, code: ProblemCode, storage: str, rule: str) -> SpecError:
        remedy = f"use a folder under {' or '.join(self._root_names)}, or omit it"
        return spec_error(code, "storage", storage, rule, remedy)


def _split(url: str) -> tuple[str, str]:
    """(protocol, path). fsspec only gets URLs that are assembled from these, never the user's text."""
    match = _URL.fullmatch(url)
    if match is None:
        return "file", url
    protocol = match["protocol"].lower()
    return ("file" if protocol in _LOCAL else protocol), match["path"]


def _is_below(path: str, root: str) -> bool:
    root = root.rstrip("/")
    return path.rstrip("/") == root or path.startswith(root + "/")
