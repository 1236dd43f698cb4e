"""Where a user's file really is: resolved, and confined to the roots that the settings allow."""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast
from urllib.parse import unquote

import fsspec

from moe.spec import Problem, SpecError

_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]*)://(?P<path>.*)", re.DOTALL)
_LOCAL = ("file", "local")
_COMPRESSION = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz"}
_REMEDY = "use the absolute path or the URL of a file"


@dataclass(frozen=True)
class Location:
    """One existing file. A local one is an absolute path with every symbolic link already followed."""

    protocol: str
    path: str

    def __str__(self) -> str:
        return self.path if self.protocol == "file" else f"{self.protocol}://{self.path}"

    def open(self) -> IO[bytes]:
        """The file's bytes, decompressed where its name says .gz, .bz2 or .xz."""
        compression = _COMPRESSION.get(os.path.splitext(self.path)[1])
        return cast(IO[bytes], _filesystem(self.protocol).open(self.path, "rb", compression=compression))

    def fingerprint(self) -> str:
        """Changes with the file: a hash of its content, or what a remote store says identifies it."""
        if self.protocol != "file":
            return str(_filesystem(self.protocol).ukey(self.path))
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def locate(place: str, given: str, roots: Sequence[str] | None) -> list[Location]:
    """The files that a path or URL names, `*` expanded, in order of name; at least one.

    A local path is absolute, has no `..`, and lies under a local root once symbolic links are followed. A URL
    has the protocol of a root and begins with it. Chained URLs (`zip://...::...`) are refused, since every
    link of the chain is a place of its own. What lies outside is refused before anything is looked up, so an
    error never tells whether it exists. `roots=None` lifts the confinement and keeps the rest. Raises
    SpecError at `place`.
    """
    protocol, path = _parse(place, given, roots)
    if protocol == "file":
        return _locate_local(place, given, path, roots)
    return _locate_remote(place, given, protocol, path, roots)


def _parse(place: str, given: str, roots: Sequence[str] | None) -> tuple[str, str]:
    """(protocol, path) by our own rules; fsspec's parser sees only what these let through."""
    if "\0" in given or "::" in given:
        what = "must not hold a NUL" if "\0" in given else "must not be a chain of URLs ('::')"
        raise SpecError(Problem(place, given, what, _REMEDY))
    url = _URL.match(given)
    protocol, path = (url["protocol"], url["path"]) if url else ("file", given)
    protocol = "file" if protocol in _LOCAL else protocol
    if protocol == "file" and not path.startswith("/"):
        raise SpecError(Problem(place, given, "must be an absolute path or a URL", _allowed(roots)))
    if any(part == ".." for part in re.split(r"[/\\]", path if protocol == "file" else unquote(path))):
        raise SpecError(Problem(place, given, "must not hold '..'", _REMEDY))
    return protocol, path


def _locate_local(place: str, given: str, path: str, roots: Sequence[str] | None) -> list[Location]:
    def follow(name: str) -> str:
        real = os.path.realpath(name)
        _confine(place, given, real, roots)
        return real

    if "*" in path:
        try:
            names = [name for name in _expand(path, follow) if not os.path.isdir(follow(name))]
        except OSError as error:
            raise _missing(place, given, error) from None
        if not names:
            raise SpecError(Problem(place, given, "matches no file", "check the folder and the pattern"))
    else:
        names = [path]
    found = []
    for name in names:
        real = follow(name)
        try:
            mode = os.stat(real).st_mode
        except OSError as error:
            raise _missing(place, given, error) from None
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise SpecError(Problem(place, given, f"is {kind}", "name a file, or files by a pattern with *"))
        if not os.access(real, os.R_OK):
            raise SpecError(Problem(place, given, "cannot be read", "allow the service's user to read it"))
        found.append(Location("file", real))
    return found


def _expand(path: str, follow: Callable[[str], str]) -> list[str]:
    """The paths that a pattern matches, in order; `follow` confines each folder before it is listed."""
    names = ["/"]
    for part in path.split("/"):
        if "*" not in part:
            names = [os.path.join(name, part) for name in names]
            continue
        matching = re.compile(".*".join(map(re.escape, re.split(r"\*+", part))), re.DOTALL)
        names = [
            os.path.join(name, entry)
            for name in names
            if os.path.isdir(follow(name))
            for entry in sorted(os.listdir(name))
            if matching.fullmatch(entry) and (part.startswith(".") or not entry.startswith("."))
        ]
    return [name for name in names if os.path.lexists(follow(name))]


def _locate_remote(
    place: str, given: str, protocol: str, path: str, roots: Sequence[str] | None
) -> list[Location]:
    if roots is not None and not any(
        given.startswith(root.rstrip("/") + "/") for root in roots if "://" in root
    ):
        raise _outside(place, given, roots)
    try:
        filesystem = _filesystem(protocol)
        if "*" in path:
            pattern = re.sub(r"([?\[])", r"[\1]", re.sub(r"\*+", "*", path))
            names = sorted(cast(list[str], filesystem.glob(pattern)))
        else:
            names = [path] if filesystem.isfile(path) else []
    except (ImportError, ValueError) as error:
        raise SpecError(
            Problem(place, given, f"cannot be opened: {error}", "install what it names")
        ) from None
    except OSError as error:
        raise _missing(place, given, error) from None
    if not names:
        rule = "matches no file" if "*" in path else "does not exist"
        raise SpecError(Problem(place, given, rule, "check its spelling"))
    return [Location(protocol, name) for name in names]


def _confine(place: str, given: str, real: str, roots: Sequence[str] | None) -> None:
    """Raise SpecError unless a path, links followed, lies under a local root, links followed."""
    if roots is None:
        return
    for root in roots:
        url = _URL.match(root)
        if url and url["protocol"] not in _LOCAL:
            continue
        folder = os.path.realpath(url["path"] if url else os.path.expanduser(root))
        if real == folder or real.startswith(folder.rstrip("/") + "/"):
            return
    raise _outside(place, given, roots)


def _outside(place: str, given: str, roots: Sequence[str]) -> SpecError:
    rule = "lies outside the folders that this service may read"
    return SpecError(Problem(place, given, rule, _allowed(roots)))


def _allowed(roots: Sequence[str] | None) -> str:
    if roots is None:
        return _REMEDY
    if not roots:
        return "start the service with --data-root FOLDER, and put the file there"
    return f"put it under {' or '.join(roots)}"


def _missing(place: str, given: str, error: OSError) -> SpecError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return SpecError(Problem(place, given, "does not exist", "check its spelling"))
    reason = error.strerror or str(error)
    return SpecError(Problem(place, given, f"cannot be read: {reason}", "check its permissions"))


def _filesystem(protocol: str) -> Any:
    return fsspec.filesystem(protocol)
