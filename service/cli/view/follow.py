"""Following a run: on a terminal a live display, elsewhere plain lines."""

import sys
import threading
import time
from collections.abc import Iterable
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from service.cli.view.amounts import clock, duration
from service.cli.view.frame import figures, frame
from service.cli.view.output import on_terminal, print_json
from service.cli.view.progress import Notice, Progress
from service.cli.view.states import STATE_STYLES
from service.wire.events import Event

FRAMES_PER_S = 5
LINE_INTERVAL_S = 5.0
NOTICE_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red", "checkpoint": "cyan"}


class Follower(Protocol):
    """Shows a run while its events come in."""

    progress: Progress

    def show(self, events: Iterable[Event]) -> None:
        """Takes every event, and draws."""

    def lost(self, error: Exception) -> None:
        """Hears that the connection broke, and is being opened again."""


class LiveFollower:
    """A frame that is redrawn in place, below the lines that stay."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self.progress, self._console, self._note = progress, console, ""
        self._lock = threading.Lock()  # rich draws in a thread of its own

    def show(self, events: Iterable[Event]) -> None:
        with Live(get_renderable=self._frame, console=self._console, refresh_per_second=FRAMES_PER_S) as live:
            for event in events:
                with self._lock:
                    self._note = ""
                    notice = self.progress.take(event)
                if notice is not None:
                    live.console.print(styled(notice))

    def lost(self, error: Exception) -> None:
        self._note = f"{error} Trying again."

    def _frame(self) -> Group:
        with self._lock:
            return frame(self.progress, self._console.width, self._console.height, self._note)


class PlainFollower:
    """A line every few seconds, and one for each thing worth keeping: for logs, pipes and CI."""

    def __init__(self, progress: Progress, console: Console) -> None:
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

    def _is_due(self) -> bool:
        return last_step(self.progress) or time.monotonic() >= self._next_line

    def lost(self, error: Exception) -> None:
        self._print(f"{time.strftime('%H:%M:%S')} connection {error} Trying again.")

    def _print(self, line: str) -> None:
        print(line, file=self._console.file, flush=True)


class JsonFollower:
    """Every event as one line of JSON."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def show(self, events: Iterable[Event]) -> None:
        for event in events:
            self.progress.take(event)
            print_json(event.model_dump(mode="json"), lines=True)

    def lost(self, error: Exception) -> None:
        print(f"shardyard: {error}", file=sys.stderr, flush=True)


def follower(progress: Progress, console: Console, as_json: bool = False) -> Follower:
    """The way to show a run that suits where the output goes."""
    if as_json:
        return JsonFollower(progress)
    drawable = on_terminal() and not console.is_dumb_terminal and not console.options.ascii_only
    return LiveFollower(progress, console) if drawable else PlainFollower(progress, console)


def last_step(progress: Progress) -> bool:
    return progress.step == progress.num_steps


def plain_step(progress: Progress) -> str:
    """The latest step on one line, in ASCII."""
    parts = [f"step {progress.step:,}/{progress.num_steps:,}"]
    parts += [f"{label} {value}" for label, value in figures(progress) if label != "checkpoint"]
    if (left := progress.seconds_left) is not None:
        parts.append(f"{duration(left)} left")
    for layer in progress.layers():
        parts.append(f"layer {layer.layer} experts {min(layer.shares):.1f}x-{max(layer.shares):.1f}x")
    return "  ".join(parts)


def styled(notice: Notice) -> Text:
    line = Text()
    line.append(f"{clock(notice.time)} ", style="dim")
    line.append(f"{notice.kind:<10} ", style=NOTICE_STYLES.get(notice.kind, "bold"))
    word, rest = notice.text.partition(":")[0], notice.text
    if notice.kind == "state":
        line.append(word, style=STATE_STYLES.get(word, ""))
        rest = notice.text.removeprefix(word)
    line.append(rest)
    return line
