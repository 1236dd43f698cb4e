"""The record of a state folder's Ray head, `ray/head.json`: written before anything is started, changed by one process
at a time, and gone once somebody has stopped the head."""

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from moe.storage.home import expand_home
from service.head.ray_start import LocalHeadError

VERSION = 3
POLL_S = 0.05
_changed_here = threading.local()
"""`paths`: the records that this thread is changing."""


def record_file(state_dir: Path | str) -> Path:
    return expand_home(state_dir).absolute() / "ray" / "head.json"


def read_record(path: Path) -> dict[str, Any] | None:
    """Reads it, in the words of the release that wrote it; None where there is none."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return record


def write_record(path: Path, record: dict[str, Any]) -> None:
    write_private(path, json.dumps({"version": VERSION, **record}, default=str, indent=2))


def restore_record(path: Path, record: dict[str, Any] | None) -> None:
    """Write back what was read before, or remove the record if there was none."""
    if record is None:
        path.unlink(missing_ok=True)
    else:
        write_record(path, record)


def write_private(path: Path, text: str) -> None:
    """Replaces the file in one step; only its owner ever could read it. Raises OSError, which names the file."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:  # of a file that is open, it knows no name
        new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def in_words(action: str) -> Iterator[None]:
    """Raises LocalHeadError for a disk that is full or cleared away: `action` cannot be done."""
    try:
        yield
    except OSError as error:
        raise LocalHeadError(f"{action}: {error.filename or 'a file'}: {error.strerror or error}") from None


@contextmanager
def changing(
    path: Path, abort: Sequence[int] = (), on_wait: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Within it no other process starts, tends or stops the head of this record; a process that dies lets go. May be
    entered again within itself. `on_wait` is called once where another process has to be waited for.

    Raises LocalHeadError when something comes into `abort` while it waits.
    """
    own_paths: set[Path] = _changed_here.__dict__.setdefault("paths", set())
    if path in own_paths:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.with_name("head.lock").open("w") as lock:
        if not _lock(lock):
            on_wait()
        while not _lock(lock):
            if abort:
                raise LocalHeadError(
                    "waiting for another process to start or stop the Ray head was broken off"
                )
            time.sleep(POLL_S)
        own_paths.add(path)
        try:
            yield
        finally:
            own_paths.remove(path)


def mark_used(path: Path) -> IO[str]:
    """The mark of a `shardyard up` that uses the head of this record, until it is closed or the process ends.

    Set before the head is looked for: what another `shardyard up` ends, it ends only where it finds no mark."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mark = path.with_name("use.lock").open("w")
    fcntl.flock(mark, fcntl.LOCK_SH)
    return mark


def is_used(path: Path) -> bool:
    """Whether a `shardyard up` has marked the head of this record as used. It may be so a moment later, unless it is
    asked within `changing`."""
    try:
        with path.with_name("use.lock").open("r+") as mark:
            return not _lock(mark)
    except FileNotFoundError:
        return False


def _lock(file: IO[str]) -> bool:
    """Takes the file for this process alone; False while another has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
