"""Places of users' files: resolved, and confined to the roots that the settings allow."""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import unquote

import fsspec

from moe.data.compression import decompress
from moe.spec import Problem, ProblemCode, SpecError, spec_error
from moe.spec.patterns import matches
from moe.storage import confined, links
from moe.storage.store_errors import in_words
from moe.storage.store_file import buffered_reader

_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]*)://(?P<path>.*)", re.DOTALL)
_LOCAL = ("file", "local")
MAX_NAMES = 100_000
"""Limit on the names that all patterns of one corpus may visit, parts of links included: about a second at the greatest
depth."""
_TOO_DEEP = f"lies more than {links.MAX_PARTS} folders deep"
_REMEDY = "use the absolute path or the URL of a file"


T = TypeVar("T")


@dataclass(frozen=True)
class Location:
    """One existing file. A local one is an absolute path with every symbolic link already followed."""

    protocol: str
    path: str
    root: str = field(default="/", compare=False)
    """The root that a local file lies under. Nothing outside of it is opened."""

    def __str__(self) -> str:
        return self.path if self.protocol == "file" else f"{self.protocol}://{self.path}"

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The file's bytes, decompressed if they are those of gzip, bzip2, xz or zstd. Raises OSError, also if a part
        of a local path has become a link."""
        with self.raw() as raw:
            content = decompress(raw)
            if content is None:
                yield raw
                return
            with content:
                yield content

    def fingerprint(self) -> str:
        """Value that changes with the file: a hash of its content, or a remote store's identifier of its version."""
        if self.protocol != "file":
            with in_words(str(self)):
                return str(_filesystem(self.protocol).ukey(self.path))
        with confined.open_file(self.root, self.path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def version(self, *, fresh: bool = False) -> "FileVersion":
        """Size and version of the file, without reading it. `fresh`: not from a listing in memory. Raises OSError."""
        if self.protocol == "file":
            with self.raw() as file:
                status = os.fstat(file.fileno())
            return FileVersion(status.st_size, f"mtime {status.st_mtime_ns}")
        with in_words(str(self)):
            filesystem = _filesystem(self.protocol)
            if fresh:
                filesystem.invalidate_cache(self.path.rpartition("/")[0])
            facts = filesystem.info(self.path)
        key = next((key for key in _VERSION_KEYS if facts.get(key)), None)
        return FileVersion(int(facts.get("size") or 0), "" if key is None else f"{key} {facts[key]}")

    def raw(self) -> IO[bytes]:
        """The file's bytes as they are. Raises OSError, as `open` does."""
        if self.protocol == "file":
            return confined.open_file(self.root, self.path)
        with in_words(str(self)):
            return buffered_reader(_filesystem(self.protocol).open(self.path, "rb"), str(self))


class FileVersion(NamedTuple):
    size_bytes: int
    name: str
    """Modification time of a local file; a remote store's ETag or the like, empty if it has none."""


_VERSION_KEYS = (
    "ETag", "etag", "generation", "md5Hash", "md5", "oid", "LastModified", "last_modified", "mtime", "updated",
    "modified", "created",
)  # fmt: skip
"""Keys of what stores say about a file that change with its content, the most reliable first. Only one is compared,
since listings and files have different others."""


class _OutwardLink(Exception):
    """A link under a root that leads out of all roots; its path."""


class NoFile(SpecError):
    """The named path does not exist, or is not a regular file."""


class Locator:
    """Finds the files that a spec's paths and URLs name.

    A local path is absolute, has no `..`, and lies under a local root once symbolic links are followed. A URL
    has the protocol of a root and begins with it. Chained URLs (`zip://...::...`) are refused, since every
    link of the chain is a place of its own. What lies outside is refused before anything is looked up, so an
    error never tells whether it exists. `roots=None` lifts the confinement and keeps the rest.
    """

    def __init__(self, roots: Sequence[str] | None, max_names: int = MAX_NAMES) -> None:
        self._roots, self._max_names = roots, max_names
        self._folders = ["/"] if roots is None else list(_local_folders(roots))
        self._num_names = 0
        """Names visited so far, by all patterns together."""

    def locate(self, place: str, pattern: str) -> list[Location]:
        """The files that a path or URL names, `*` expanded, in order of name; at least one. Raises SpecError at
        `place`."""
        protocol, path = _parse(place, pattern, self._roots)
        try:
            if protocol == "file":
                return self._locate_local(place, pattern, path)
            return self._locate_remote(place, pattern, protocol, path)
        except _OutwardLink as error:
            raise _outward(place, pattern, str(error), self._roots or ()) from None
        except confined.Outside:
            raise _outside(place, pattern, self._roots or ()) from None
        except OSError as error:
            raise _missing(place, pattern, error) from None

    def relocate(self, place: str, url: str) -> Location:
        """The file whose `Location` was written as `url`. A remote store is not asked for it: thousands of files would
        take minutes. Raises SpecError at `place`, NoFile for a local file that is gone."""
        protocol, path = _parse(place, url, self._roots)
        if protocol != "file":
            self._require_remote_root(place, url)
            return Location(protocol, path)
        # A star in the address matches others, too.
        exact_matches = [location for location in self.locate(place, url) if str(location) == url]
        return exact_matches[0] if exact_matches else self._raise_not_found(place, url)

    def _locate_local(self, place: str, pattern: str, path: str) -> list[Location]:
        def step(folder: str, part: str) -> Iterator[str]:
            """Matches of `part` in `folder`, with their links resolved, so that a folder in the result has none."""
            with _skip_vanished():
                if "*" in part:
                    with confined.listing(self._root_of(folder), folder) as entries:
                        matches = sorted(
                            (entry.name, entry.is_symlink())
                            for entry in self._counted_entries(place, pattern, entries)
                            if _fits(part, entry.name)
                        )
                else:
                    # What follows a name that is not there is not looked for.
                    matches = [
                        (name, stat.S_ISLNK(os.lstat(os.path.join(folder, name)).st_mode))
                        for name in self._counted_entries(place, pattern, [part])
                    ]
                for name, is_link in matches:
                    with _skip_vanished():  # of this one alone
                        if is_link:
                            yield self._followed_link(place, pattern, name, folder)
                        else:
                            yield os.path.join(folder, name)

        locations = []
        for name in _expand_pattern(path, lambda path: self._followed_link(place, pattern, path or "/"), step):
            location = Location("file", name, self._root_of(name))
            with _skip_vanished() if "*" in path else nullcontext():
                location.raw().close()  # a regular file, which can be read
                locations.append(location)
        return locations or self._raise_not_found(place, pattern)

    def _locate_remote(self, place: str, pattern: str, protocol: str, path: str) -> list[Location]:
        self._require_remote_root(place, pattern)
        try:
            filesystem = _filesystem(protocol)

            def step(folder: str, part: str) -> Iterator[str]:
                if "*" not in part:
                    yield os.path.join(folder, part)
                    return
                with _skip_vanished():
                    with in_words(f"{protocol}://{folder}"):
                        paths = filesystem.ls(folder, detail=False)
                    names = (path.rstrip("/").rpartition("/")[2] for path in paths)
                    matches = [name for name in self._counted_entries(place, pattern, names) if _fits(part, name)]
                    yield from (os.path.join(folder, name) for name in sorted(matches))

            locations = [
                Location(protocol, name)
                for name in _expand_pattern(path, str, step)
                if _is_file(filesystem, name, f"{protocol}://{name}")
            ]
        except SpecError:
            raise
        except (ImportError, ValueError) as error:
            code: ProblemCode = "not_installed" if isinstance(error, ImportError) else "unreadable"
            remedy = "install the missing package" if isinstance(error, ImportError) else _REMEDY
            raise spec_error(code, place, pattern, f"cannot be opened: {error}", remedy) from None
        return locations or self._raise_not_found(place, pattern)

    def _require_remote_root(self, place: str, pattern: str) -> None:
        roots = self._roots
        if roots is not None and not any(pattern.startswith(root.rstrip("/") + "/") for root in roots if "://" in root):
            raise _outside(place, pattern, roots)

    def _counted_entries(self, place: str, pattern: str, entries: Iterable[T]) -> Iterator[T]:
        """The same entries, counted. Raises SpecError when they and those before exceed the limit."""
        for entry in entries:
            self._count(place, pattern)
            yield entry

    def _count(self, place: str, pattern: str) -> None:
        self._num_names += 1
        if self._num_names > self._max_names:
            rule = (
                f"makes the service examine more than {self._max_names:,} names, including links and earlier patterns"
            )
            raise spec_error("too_large", place, pattern, rule, "move the files to a folder of their own, or list them")

    def _resolve_links(self, place: str, pattern: str, path: str, base: str = "/") -> str:
        """The path with every link resolved; a relative path begins in `base`, which has no links. Raises Outside;
        OSError for a path that is too deep or has too many links; SpecError as `_looked_at` does."""
        try:
            real = links.follow_links(path, base, lambda: self._count(place, pattern))
        except OSError as error:
            self._root_of(error.filename)  # reveals nothing about what lies outside
            raise
        self._root_of(real)
        return real

    def _followed_link(self, place: str, pattern: str, path: str, base: str = "/") -> str:
        """Resolve links as `_resolve_links` does. Raises _OutwardLink, which names the link, if one under a root leads
        out of all roots. Reveals nothing about what lies outside."""
        try:
            return self._resolve_links(place, pattern, path, base)
        except confined.Outside:
            real = base
            for part in path.split("/"):
                link = os.path.join(real, part)
                is_beneath = any(confined.contains(folder, link) for folder in self._folders)
                if not is_beneath or os.path.islink(link):
                    try:
                        real = links.follow_links(link)
                    except OSError:  # outside, since `_resolve_links` found it so
                        break
                    if is_beneath and not any(confined.contains(folder, real) for folder in self._folders):
                        raise _OutwardLink(link) from None
                else:
                    real = link
            raise

    def _root_of(self, real: str) -> str:
        """The local root that contains a path without links. Raises Outside."""
        for folder in self._folders:
            if confined.contains(folder, real):
                return folder
        raise confined.Outside(real)

    def _raise_not_found(self, place: str, pattern: str) -> NoReturn:
        rule = "matches no file" if "*" in pattern else "does not exist"
        raise NoFile(Problem("not_found", place, pattern, rule, "check the folder and the spelling"))


def _expand_pattern(path: str, begin: Callable[[str], str], step: Callable[[str, str], Iterable[str]]) -> list[str]:
    """Paths that a pattern may match, in order; their last part need not exist. `begin` resolves what comes before the
    first part with a star; `step` lists the matches of each further part in a folder."""
    parts = path.split("/")
    first = next((index for index, part in enumerate(parts) if "*" in part), len(parts))
    paths = [begin("/".join(parts[:first]))]
    for part in parts[first:]:
        paths = [name for folder in paths for name in step(folder, part)]
    return paths


@contextmanager
def _skip_vanished() -> Iterator[None]:
    """Ignore what a pattern does not match: a folder in place of a file, a file in place of a folder, a dead link."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        pass
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link that leads to itself
            raise


def _fits(pattern: str, name: str) -> bool:
    return matches(pattern, name) and (pattern.startswith(".") or not name.startswith("."))


def _parse(place: str, pattern: str, roots: Sequence[str] | None) -> tuple[str, str]:
    """(protocol, path) by our own rules. fsspec parses only what they accept."""
    if "\0" in pattern or "::" in pattern:
        rule = "must not contain NUL" if "\0" in pattern else "must not be a chain of URLs ('::')"
        raise spec_error("invalid_value", place, pattern, rule, _REMEDY)
    url = _URL.match(pattern)
    protocol, path = (url["protocol"], url["path"]) if url else ("file", pattern)
    protocol = "file" if protocol in _LOCAL else protocol
    if protocol == "file" and not path.startswith("/"):
        raise spec_error("invalid_value", place, pattern, "must be an absolute path or a URL", _root_remedy(roots))
    if any(part == ".." for part in re.split(r"[/\\]", path if protocol == "file" else unquote(path))):
        raise spec_error("not_allowed", place, pattern, "must not contain '..'", _REMEDY)
    if protocol != "file":
        return protocol, path
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if len(parts) > links.MAX_PARTS:
        raise spec_error("too_large", place, pattern, _TOO_DEEP, "move the files to a less deep folder")
    return protocol, "/" + "/".join(parts)


def _local_folders(roots: Sequence[str]) -> Iterator[str]:
    """Local roots, with links resolved."""
    for root in roots:
        url = _URL.match(root)
        if not url or url["protocol"] in _LOCAL:
            yield os.path.realpath(url["path"] if url else os.path.expanduser(root))


def _outside(place: str, pattern: str, roots: Sequence[str]) -> SpecError:
    rule = "lies outside the folders that this service may read"
    return spec_error("not_allowed", place, pattern, rule, _root_remedy(roots))


def _outward(place: str, pattern: str, link: str, roots: Sequence[str]) -> SpecError:
    rule = f"contains a link that leads out of the folders that this service may read: {link}"
    remedy = f"remove the link, move its target below {' or '.join(roots)}, or list the other files"
    return spec_error("not_allowed", place, pattern, rule, remedy)


def _root_remedy(roots: Sequence[str] | None) -> str:
    if roots is None:
        return _REMEDY
    if not roots:
        return "start the service with --data-root FOLDER, and put the file there"
    return f"move it below {' or '.join(roots)}, or start the service with --data-root FOLDER for its folder, too"


def _missing(place: str, pattern: str, error: OSError) -> SpecError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NoFile(Problem("not_found", place, pattern, "does not exist", "check its spelling"))
    if isinstance(error, IsADirectoryError) or error.errno == errno.EINVAL:
        kind = "a folder" if isinstance(error, IsADirectoryError) else "not a regular file"
        return NoFile(Problem("wrong_type", place, pattern, f"is {kind}", "name a file, or a pattern with *"))
    reason = error.strerror or str(error)
    if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
        return spec_error(
            "unreadable", place, pattern, reason, "move the files to a less deep folder, or name the links' targets"
        )
    return spec_error("unreadable", place, pattern, f"cannot be read: {reason}", "check its permissions")


def _is_file(filesystem: Any, path: str, url: str) -> bool:
    """Whether a store has the file. Unlike the file systems' `isfile`, raises OSError for a store that fails."""
    try:
        with in_words(url):
            return bool(filesystem.info(path)["type"] == "file")
    except (FileNotFoundError, NotADirectoryError):
        return False


def _filesystem(protocol: str) -> Any:
    return fsspec.filesystem(protocol)
