"""Follows a run: a live display on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.text import Text

from service.cli.view.amounts import clock, duration
from service.cli.view.frame import figures, frame
from service.cli.view.jobs import STATE_STYLES
from service.cli.view.output import on_terminal, print_json
from service.cli.view.preparation import describe_preparation
from service.cli.view.progress import ProgressLine, RunProgress
from service.client.errors import ClientError
from service.wire.events import Event

FRAMES_PER_S = 5
KEPT_NOTICES = 200
"""Lines kept for redrawing after a resize, as far as they fit."""
LINE_INTERVAL_S = 5.0
STATUS_INTERVAL_S = 5.0
NOTICE_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red"}


class Follower(Protocol):
    """Shows a run as its events arrive."""

    progress: RunProgress

    def show(self, events: Iterable[Event]) -> None:
        """Process and draw all events."""

    def on_disconnect(self, error: Exception) -> None:
        """Called when the connection broke and is being reopened."""


class LiveFollower:
    """A frame redrawn in place, below permanent lines. One lock covers all drawing: a frame computed while another
    thread writes would erase the wrong rows."""

    def __init__(
        self,
        progress: RunProgress,
        console: Console,
        frames_per_s: float = FRAMES_PER_S,
        run_status: Callable[[], dict[str, Any] | None] | None = None,
    ) -> None:
        """`run_status`: fetches the ranks' last status, in its own thread."""
        self.progress, self._console, self._note = progress, console, ""
        self._run_status = run_status
        self._run: dict[str, Any] | None = None
        self._interval_s = 1 / frames_per_s
        self._lock = threading.RLock()
        self._size = console.size
        self._notices = deque[Text](maxlen=KEPT_NOTICES)
        self._live = Live(console=console, auto_refresh=False)

    def show(self, events: Iterable[Event]) -> None:
        ended = threading.Event()
        redraws = threading.Thread(target=self._redraw, args=(ended,), daemon=True)
        with self._live:
            redraws.start()
            if self._run_status is not None:
                threading.Thread(target=self._ask_for_status, args=(ended,), daemon=True).start()
            try:
                for event in events:
                    with self._lock:
                        self._note = ""
                        if (notice := self.progress.take(event)) is not None:
                            self._draw(style_notice(notice))
            finally:
                ended.set()
                redraws.join()
                self._live.update(self._frame())

    def on_disconnect(self, error: Exception) -> None:
        with self._lock:
            self._note = f"{error} Trying again."

    def _ask_for_status(self, ended: threading.Event) -> None:
        while not ended.wait(STATUS_INTERVAL_S):
            assert self._run_status is not None
            try:
                self._run = self._run_status()
            except ClientError:
                self._run = None  # a stale status would look current

    def _redraw(self, ended: threading.Event) -> None:
        while not ended.wait(self._interval_s):
            with suppress(OSError):  # the terminal closed; the other thread gets the error too
                self._draw()

    def _draw(self, notice: Text | None = None) -> None:
        """Draw the frame, with `notice` above it, in one write."""
        with self._lock, self._console:
            lines: list[Text] = []
            if (size := self._console.size) != self._size:
                # Terminals reflow rows differently after a resize: the frame's position is unknown.
                self._size = size
                self._console.control(Control.clear(), Control.home())
                lines = self._notices_that_fit()
            if notice is not None:
                self._notices.append(notice)
                lines.append(notice)
            self._live.update(self._frame(), refresh=True)
            if lines:
                self._console.print(Group(*lines))

    def _notices_that_fit(self) -> list[Text]:
        """Newest permanent lines that fit above the frame."""
        width = self._console.width
        room = self._console.height - len(self._console.render_lines(self._frame(), pad=False)) - 1
        newest: list[Text] = []
        for notice in reversed(self._notices):
            room -= len(notice.wrap(self._console, width))
            if room < 0:
                break
            newest.append(notice)
        return newest[::-1]

    def _frame(self) -> Group:
        return frame(self.progress, self._console.width, self._console.height, self._note, self._run)


class PlainFollower:
    """A line every few seconds and per notice, for logs and pipes."""

    def __init__(self, progress: RunProgress, console: Console) -> None:
        self.progress, self._console = progress, console
        self._next_line = 0.0

    def show(self, events: Iterable[Event]) -> None:
        for event in events:
            notice = self.progress.take(event)
            if notice is not None:
                self._print(f"{clock(notice.time)} {notice.kind:<10} {notice.text}")
            elif event.kind == "metric" and not event.superseded and self._is_due():
                self._next_line = time.monotonic() + LINE_INTERVAL_S
                self._print(f"{clock(event.time)} {plain_step(self.progress)}")
            elif self.progress.preparation is not None and time.monotonic() >= self._next_line:
                self._next_line = time.monotonic() + LINE_INTERVAL_S
                self._print(f"{clock(event.time)} {describe_preparation(self.progress.preparation)}")

    def _is_due(self) -> bool:
        return last_step(self.progress) or time.monotonic() >= self._next_line

    def on_disconnect(self, error: Exception) -> None:
        self._print(f"{time.strftime('%H:%M:%S')} connection {error} Trying again.")

    def _print(self, line: str) -> None:
        print(line, file=self._console.file, flush=True)


class JsonFollower:
    """One line of JSON per event."""

    def __init__(self, progress: RunProgress) -> None:
        self.progress = progress

    def show(self, events: Iterable[Event]) -> None:
        for event in events:
            self.progress.take(event)
            print_json(event.model_dump(mode="json"), lines=True)

    def on_disconnect(self, error: Exception) -> None:
        print(f"shardyard: {error}", file=sys.stderr, flush=True)


def follower(
    progress: RunProgress,
    console: Console,
    as_json: bool = False,
    run_status: Callable[[], dict[str, Any] | None] | None = None,
) -> Follower:
    """Follower that suits the output."""
    if as_json:
        return JsonFollower(progress)
    drawable = on_terminal() and not console.is_dumb_terminal and not console.options.ascii_only
    if drawable:
        return LiveFollower(progress, console, run_status=run_status)
    return PlainFollower(progress, console)


def last_step(progress: RunProgress) -> bool:
    return progress.step == progress.num_steps


def plain_step(progress: RunProgress) -> str:
    """The latest step on one line, in ASCII."""
    parts = [f"step {progress.step:,}/{progress.num_steps:,}"]
    parts += [f"{label} {value}" for label, value in figures(progress)]
    if (left := progress.seconds_left) is not None:
        parts.append(f"{duration(left)} left")
    for layer in progress.layers():
        parts.append(f"layer {layer.layer} experts {min(layer.shares):.1f}x-{max(layer.shares):.1f}x")
    return "  ".join(parts)


def style_notice(notice: ProgressLine) -> Text:
    line = Text()
    line.append(f"{clock(notice.time)} ", style="dim")
    line.append(f"{notice.kind:<10} ", style=NOTICE_STYLES.get(notice.kind, "bold"))
    word, rest = notice.text.partition(":")[0], notice.text
    if notice.kind == "state":
        line.append(word, style=STATE_STYLES.get(word, ""))
        rest = notice.text.removeprefix(word)
    line.append(rest)
    return line
