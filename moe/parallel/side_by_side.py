"""Two passes side by side on one rank: one computes while rows of the other travel.

The passes have a thread each, of which one runs at a time. Where a pass is about to wait for an exchange that it has
begun, it gives way to the other, until that gives way in turn or ends. So both exchange at the same points on every
rank, and collectives keep their order. On a GPU both submit to one stream, in which the computation of the other pass
comes before the wait.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from moe.activity import assisting
from moe.parallel.accelerator import accelerator
from moe.parallel.collective import keeping_action


def side_by_side(device: torch.device, *passes: Callable[[], None]) -> None:
    """Run one pass, or two that take turns, the first one first. An error of either is raised; the other pass is then
    not finished."""
    if len(passes) == 1:
        passes[0]()
        return
    first, second = passes
    global _turns
    assert _turns is None, "passes side by side run no others"
    _turns = turns = _Turns()
    ending = _second_thread().submit(_assist, threading.get_ident(), lambda: turns.run(1, second, device))
    try:
        turns.run(0, first, device)
    except _AbandonedError:
        pass  # the error of the second pass is raised below
    except BaseException:
        ending.exception()  # it is abandoned
        raise
    finally:
        _turns = None
    ending.result()


def give_way() -> None:
    """Let the other pass run, if there is one, before a wait for an exchange."""
    if _turns is not None:
        with keeping_action():
            _turns.give_way()


def _assist(thread: int, run: Callable[[], None]) -> None:
    """Run the second pass: heartbeats of `thread`, which runs the first one, name the collectives of both."""
    with assisting(thread):
        run()


class _AbandonedError(Exception):
    """The pass beside this one has failed."""


class _Turns:
    """Turns of two passes, numbered 0 and 1."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running = 0
        self._ended = [False, False]
        self._failed = False

    def run(self, number: int, run_pass: Callable[[], None], device: torch.device) -> None:
        """Run a pass from its first turn on."""
        accelerator(device).make_current()
        try:
            self._await_turn(number)
            run_pass()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._pass_on(number, ends=True)

    def give_way(self) -> None:
        """Suspend the running pass until the other gives way or ends. Autograd may call it in a thread of its own."""
        number = self._running
        if not self._ended[1 - number]:
            self._pass_on(number)
            self._await_turn(number)

    def _pass_on(self, number: int, *, ends: bool = False) -> None:
        with self._condition:
            self._ended[number] |= ends
            self._running = 1 - number
            self._condition.notify_all()

    def _await_turn(self, number: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._running == number)
        if self._failed:
            raise _AbandonedError


_turns: _Turns | None = None
"""Turns of the passes that run now: a variable of the module, since they run in several threads."""


@cache
def _second_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "second pass")
