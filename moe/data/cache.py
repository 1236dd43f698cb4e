"""Folders built once, and found by the hash of their inputs."""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_MARKER = "complete.json"


class Cache:
    """Folders by key, each built once. Safe between processes on one file system.

    A folder is built under a temporary name and then renamed. Its marker holds the size and SHA-256 of every file: a
    folder whose files differ from its marker counts as absent, and is built again.
    """

    def __init__(self, folder: str | Path, report: Callable[[str], None]) -> None:
        self._folder = Path(folder)
        self._report = report

    def find_or_build(self, key: str, build: Callable[[Path], None]) -> Path:
        """The complete folder of `key`. If there is none, `build` fills an empty one."""
        place = self._folder / key
        if self._is_intact(place):
            return place
        self._folder.mkdir(parents=True, exist_ok=True)
        with _file_lock(self._folder / f"{key}.lock"):
            if self._is_intact(place):  # another process built it while this one waited
                return place
            self._build(place, build)
        return place

    def _is_intact(self, place: Path) -> bool:
        try:
            fault = problem(place)
        except FileNotFoundError:
            return False
        if fault:
            self._report(f"rebuilding {place.name}: {fault}")
        return not fault

    def _build(self, place: Path, build: Callable[[Path], None]) -> None:
        """Build a folder. The lock is held, so that no process uses the remains of earlier builds."""
        for leftover in self._folder.glob(f"{place.name}.building-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        staging_folder = self._folder / f"{place.name}.building-{os.getpid()}-{time.time_ns()}"
        staging_folder.mkdir()
        try:
            build(staging_folder)
            files = {path.relative_to(staging_folder).as_posix(): _digest(path) for path in _files(staging_folder)}
            (staging_folder / _MARKER).write_text(json.dumps({"version": 1, "files": files}, indent=1))
            if place.exists():
                # Readers that still map the old files keep them: removal takes the names, not the pages.
                obsolete_folder = self._folder / f"{place.name}.building-discarded-{time.time_ns()}"
                place.rename(obsolete_folder)
                shutil.rmtree(obsolete_folder, ignore_errors=True)
            staging_folder.rename(place)
        except BaseException:
            shutil.rmtree(staging_folder, ignore_errors=True)
            raise


def link(place: Path, folder: Path) -> None:
    """Fill an empty folder with hard links to the files of a built one, or with copies where links are impossible.
    Files of a built folder are never written to."""
    for path in _files(place):
        if path.name == _MARKER:
            continue  # the builder of a folder writes its marker
        target = folder / path.relative_to(place)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except OSError:  # on another file system, or on one without links
            shutil.copyfile(path, target)


def problem(place: Path) -> str | None:
    """Difference between a built folder and its marker; None if there is none. Raises FileNotFoundError if the folder
    does not exist."""
    if not place.is_dir():
        raise FileNotFoundError(place)
    try:
        files = json.loads((place / _MARKER).read_text())["files"]
        for name, expected_digest in files.items():
            if _digest(place / name) != expected_digest:
                return f"{name} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it is torn ({error})"
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> dict[str, object]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold a file lock, which the kernel releases when its holder dies."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
