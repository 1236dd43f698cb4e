"""Record of a state folder's Ray head, `ray/head.json`: written before anything is started, changed by one process
at a time, removed when the head is stopped."""

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
_thread_state = threading.local()
"""`paths`: records that this thread is changing."""


def record_file(state_dir: Path | str) -> Path:
    return expand_home(state_dir).absolute() / "ray" / "head.json"


def read_record(path: Path) -> dict[str, Any] | None:
    """The record, as written by any release; None without one."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return record


def write_record(path: Path, record: dict[str, Any]) -> None:
    write_private(path, json.dumps({"version": VERSION, **record}, default=str, indent=2))


def restore_record(path: Path, record: dict[str, Any] | None) -> None:
    """Write back an earlier record, or remove the file."""
    if record is None:
        path.unlink(missing_ok=True)
    else:
        write_record(path, record)


def write_private(path: Path, text: str) -> None:
    """Replace the file atomically, readable by its owner only. Raises OSError with its name."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:  # errors on open files have no file name
        new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def in_words(action: str) -> Iterator[None]:
    """Raises LocalHeadError for an OSError: `action` cannot be done."""
    try:
        yield
    except OSError as error:
        raise LocalHeadError(f"{action}: {error.filename or 'a file'}: {error.strerror or error}") from None


@contextmanager
def changing(path: Path, abort: Sequence[int] = (), on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Lock of a record, under which its head is started, restarted and stopped. Reentrant, and released when the
    process dies. `on_wait` is called once if it is held elsewhere. Raises LocalHeadError if `abort` is filled
    meanwhile."""
    own_paths: set[Path] = _thread_state.__dict__.setdefault("paths", set())
    if path in own_paths:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.with_name("head.lock").open("w") as lock:
        if not _lock(lock):
            on_wait()
        while not _lock(lock):
            if abort:
                raise LocalHeadError("stopped waiting for another process to start or stop the Ray head")
            time.sleep(POLL_S)
        own_paths.add(path)
        try:
            yield
        finally:
            own_paths.remove(path)


def mark_used(path: Path) -> IO[str]:
    """Mark the head as used by a `shardyard up`, until closed or the process ends. Set before the head is looked up:
    another `shardyard up` stops only unmarked heads."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mark = path.with_name("use.lock").open("w")
    fcntl.flock(mark, fcntl.LOCK_SH)
    return mark


def is_used(path: Path) -> bool:
    """Whether a `shardyard up` uses the head. Stable only within `changing`."""
    try:
        with path.with_name("use.lock").open("r+") as mark:
            return not _lock(mark)
    except FileNotFoundError:
        return False


def _lock(file: IO[str]) -> bool:
    """Lock the file exclusively; False while another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
