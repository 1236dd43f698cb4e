"""Ctrl-C and SIGTERM as an exception, or deferred where work must not be interrupted."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption(BaseException):
    """A signal asked this process to end. A BaseException, so that no `except Exception` swallows it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)

    @property
    def exit_code(self) -> int:
        """Exit code that shells report for a process ended by the signal."""
        return 128 + self.number


@contextmanager
def interruptions() -> Iterator[None]:
    """Context in which the first signal raises Interruption; later ones are ignored."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for signal_number in before:
            signal.signal(signal_number, signal.SIG_IGN)
        raise Interruption(number)

    def hang_up(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGTERM)  # to its current handler, such as a running server's

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, interrupt),
        signal.SIGTERM: signal.signal(signal.SIGTERM, interrupt),
    }
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup leaves it
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, hang_up)
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Context that ignores signals, for a clean-up that takes seconds."""
    before = {
        signal_number: signal.signal(signal_number, signal.SIG_IGN)
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


@contextmanager
def defer_signals(came: list[int] | None = None) -> Iterator[list[int]]:
    """Context that defers signals: yields the list of their numbers (`came` if given), and raises the first at the
    end. For work that polls the list, such as starting a process, which an exception would lose. No effect outside
    the main thread."""
    came = [] if came is None else came
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            signal_number: signal.signal(signal_number, lambda number, frame: came.append(number))
            for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(signal_number) != signal.SIG_IGN
        }
    try:
        yield came
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)
        if came and before:
            signal.raise_signal(came[0])
