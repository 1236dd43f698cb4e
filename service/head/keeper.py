"""Supervisor of the Ray head of `shardyard up`: checks every second, restarts only what has died.

The dashboard is restarted alone, while training continues. Without the GCS or the raylet, the whole head is restarted
at the same dashboard address, and jobs resume from their last checkpoints. Restarts back off; after several within a
while, the head is given up. A head that somebody stopped stays stopped; one that another keeper restarted is adopted.
"""

import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import structlog

from service.head.local_head import LocalHead
from service.head.ray_start import LocalHeadError
from service.head.record import write_private
from service.wire.trouble import Trouble

LOOK_INTERVAL_S = 1.0
MAX_TRIES = 6
WITHIN_S = 600.0
"""Age at which restarts no longer count."""
BACKOFF_S, MAX_BACKOFF_S = 2.0, 60.0
STOPPED = "its Ray head was stopped, as by 'shardyard down': restart 'shardyard up'"
log = structlog.get_logger(__name__)

Dead = Literal["dashboard", "head"]


@dataclass(frozen=True)
class Try:
    """Restart now."""


@dataclass(frozen=True)
class Pause:
    """Do not restart before `left_s` seconds."""

    left_s: float


@dataclass(frozen=True)
class GiveUp:
    """Too many restarts."""


def next_try(tries: Sequence[float], now_s: float) -> Try | Pause | GiveUp:
    """Decide about a dead part, given the times of earlier restarts."""
    recent = [try_time for try_time in tries if now_s - try_time < WITHIN_S]
    if len(recent) >= MAX_TRIES:
        return GiveUp()
    if not recent:
        return Try()
    wait_s = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (len(recent) - 1))
    left_s = recent[-1] + wait_s - now_s
    return Pause(left_s) if left_s > 0 else Try()


class HeadKeeper:
    """Keeps a head running, in its own thread between `start` and `stop`."""

    def __init__(self, head: LocalHead) -> None:
        self.head = head
        """The newest head: it may have been restarted."""
        self._token: tuple[Path, str] | None = None
        """(folder of a head, its token), as last read."""
        self._tries: list[float] = []
        self._died_at: datetime | None = None
        self._trouble: str | None = None
        self._runs_nothing = False
        self._given_up = False
        self._stopping = threading.Event()
        self._abort: list[int] = []
        self._thread = threading.Thread(target=self._run, name="head-keeper", daemon=True)
        self._keep_token()  # before the file can be removed

    def start(self) -> "HeadKeeper":
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop supervising, and abort a restart in progress."""
        self._stopping.set()
        self._abort.append(signal.SIGTERM)
        self._thread.join()

    def trouble(self) -> Trouble | None:
        """Current fault of the head, with what is or must be done; None while it runs."""
        words = self._trouble
        return None if words is None else Trouble(words, self._runs_nothing)

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_INTERVAL_S):
            try:
                self.look()
            except Exception:
                log.exception("could not check the Ray head; will retry")

    def look(self) -> None:
        """Check the head once; make at most one attempt to restart what is dead."""
        try:
            self.head = self.head.newest()
        except LocalHeadError:
            if self._trouble != STOPPED:
                log.warning("the Ray head was stopped from outside; leaving it stopped")
            self._trouble, self._runs_nothing = STOPPED, True
            return
        self._keep_token()
        dead = self._dead()
        self._runs_nothing = dead == "head"
        if dead is None:
            if self._trouble is not None:
                log.info("the Ray head is running again", dashboard=self.head.dashboard_url)
            self._died_at = self._trouble = None
            self._given_up = False
            return
        if self._died_at is None:
            self._died_at = datetime.now(UTC)
            last_words = self.head.last_words("raylet") if dead == "head" else []
            log.warning("part of the Ray head died", parts=self._parts(dead), said="\n".join(last_words))
        if self._given_up:
            return
        now_s = time.monotonic()
        self._tries = [try_time for try_time in self._tries if now_s - try_time < WITHIN_S]
        match next_try(self._tries, now_s):
            case Try():
                self._tries.append(now_s)
                self._trouble = self._words(dead, f"and is being restarted (try {len(self._tries)} of {MAX_TRIES})")
                log.warning("restarting it", what=dead, attempt=len(self._tries), of=MAX_TRIES)
                self._restart(dead)
            case Pause():
                words = f"and will be restarted later (tried {len(self._tries)} of {MAX_TRIES} times)"
                self._trouble = self._trouble or self._words(dead, words)
            case GiveUp():
                self._given_up = True
                self._trouble = self._words(
                    dead,
                    f"and was restarted {MAX_TRIES} times in vain: end 'shardyard up', fix what its log "
                    "says about Ray, and start it again",
                )
                log.error("giving up on the Ray head", why=self._trouble)

    def _keep_token(self) -> None:
        """Remember the token, and restore its file if removed: drivers and others read it."""
        path = self.head.token_path
        try:
            self._token = (self.head.folder, path.read_text())
        except OSError:
            if path.exists():
                return  # unreadable: callers of Ray report it
            if self._token is not None and self._token[0] == self.head.folder:
                with suppress(OSError):  # a full disk: retried at the next check
                    write_private(path, self._token[1])
                    log.warning("the token file was removed; writing it again", path=str(path))

    def _restart(self, dead: Dead) -> None:
        try:
            if dead == "dashboard":
                self.head = self.head.with_dashboard(abort=self._abort)
            else:
                self.head = self.head.restart(abort=self._abort)
        except (LocalHeadError, OSError) as error:
            if not self._stopping.is_set():
                log.error("the Ray head did not start", why=str(error))

    def _dead(self) -> Dead | None:
        if not self.head.running():
            return "head"
        return None if self.head.dashboard.running() else "dashboard"

    def _parts(self, dead: Dead) -> str:
        if dead == "dashboard":
            return "dashboard"
        return " and ".join(self.head.dead_parts()) or ("processes" if self.head.has_files() else "folder")

    def _words(self, dead: Dead, action: str) -> str:
        since = self._died_at or datetime.now(UTC)
        goes_on = "; training continues" if dead == "dashboard" else ""
        parts = self._parts(dead)
        verb = "was removed" if parts == "folder" else "died"
        return f"the {parts} of its Ray head {verb} at {since:%Y-%m-%dT%H:%M:%SZ}, {action}{goes_on}"
