"""Thread that carries out the orders for one run of one tracker."""

import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable

from service.tracker.credentials import hide_secrets
from service.tracker.messages import StepItem, TrackedRun, TrackerOrder, TrackerReply
from service.tracker.run import AppendOnlyRun, RewindableRun, TrackerRun
from service.tracker.runs import build_run
from service.tracker.step_ranges import StepRanges
from service.tracker.values import StepValues, has_evaluation, number_prefix, step_values

FIRST_WAIT_S, MOST_WAIT_S = 0.5, 30.0
MAX_WORDS = 300


class RunWriter:
    """Writes a run in a thread of its own, so that a tracker that hangs delays no other.

    After an error all orders are left out until the run is to be opened again: the parent then sends what the tracker
    does not have.
    """

    def __init__(self, run: TrackedRun, reply: Callable[[TrackerReply], None]) -> None:
        self._facts, self._reply = run, reply
        self._number_prefix = number_prefix(run.spec)
        self._run: TrackerRun | None = None
        self._written = StepRanges()
        self._writer: tuple[int, int] | None = None
        """(attempt, group) that recorded the last step written."""
        self._repeated: tuple[int, int] | None = None
        """First and last of repeated steps that keep their first values, not yet reported."""
        self._is_waiting = False
        self._may_repeat = False
        """Whether the next order may have been carried out in part before."""
        self._wait_s = 0.0
        """Delay of the next attempt to open the run; 0 since the last success."""
        self._orders = queue.SimpleQueue[TrackerOrder]()
        self._is_closed = threading.Event()
        """Set as soon as the run is not wanted any more, also while it cannot be opened."""
        threading.Thread(target=self._work, name=run.job_id, daemon=True).start()

    def put(self, order: TrackerOrder) -> None:
        """Queue an order; returns at once."""
        self._orders.put(order)
        if order.close:
            self._is_closed.set()

    def _work(self) -> None:
        while True:
            order = self._orders.get()
            if order.close:
                self._close()
                return
            try:
                if order.open is not None:
                    self._open()
                elif self._run is not None:
                    self._carry_out(self._run, order)
            except Exception as error:
                self._fail(error, self._run is not None and self._run.is_of_process)

    def _open(self) -> None:
        """Open the run; repeated until that succeeds or the run is to be closed."""
        self._close()
        while self._run is None and not self._is_closed.wait(self._wait_s):
            run = build_run(self._facts)
            try:
                place = run.open()
            except Exception as error:
                self._fail(error, run.is_of_process)
                continue
            self._run, self._may_repeat = run, True
            self._written, self._is_waiting = StepRanges(run.last_step), False
            self._say("opened", place=place, last_step=run.last_step)

    def _carry_out(self, run: TrackerRun, order: TrackerOrder) -> None:
        if order.waiting != self._is_waiting and order.end is None:
            run.set_waiting(order.waiting)
            self._is_waiting = order.waiting
        step_before = run.last_step
        self._write_steps(run, order.steps)
        if order.system and run.last_step not in (None, step_before) and not self._may_repeat:
            run.write_system(run.last_step or 0, order.steps[-1].time_s, order.system)
        if order.end is not None:
            if isinstance(run, AppendOnlyRun):
                self._report_repeated(run)
            run.end(order.end)
            self._close()
        self._wait_s, self._may_repeat = 0.0, False
        self._say("written", through=order.through)

    def _fail(self, error: Exception, needs_process: bool) -> None:
        if not self._wait_s:
            traceback.print_exception(error)
        self._wait_s = min(MOST_WAIT_S, 2 * self._wait_s or FIRST_WAIT_S)
        self._close()
        self._say("trouble", words=_in_words(error))
        if needs_process:
            os.killpg(os.getpgid(0), signal.SIGKILL)  # the parent starts another

    def _write_steps(self, run: TrackerRun, items: tuple[StepItem, ...]) -> None:
        batch: list[StepValues] = []
        last_step = run.last_step

        def flush() -> None:
            if batch:
                run.write(batch)
                for point in batch:
                    self._written.add(point.step)
                batch.clear()

        for item in items:
            is_known = last_step is not None and item.step <= last_step
            if item.late:
                if item.step in self._written:
                    continue
                if is_known and self._facts.tracker == "wandb":
                    self._say("note", words=f"step {item.step} arrived after later ones, which W&B does not accept")
                    continue
            elif is_known:
                if not isinstance(run, RewindableRun):
                    self._skip(item)
                    continue
                flush()
                run.rewind(item.step)
                self._written.cut(item.step)
                last_step = item.step
            if not item.late:
                last_step = item.step if last_step is None else max(last_step, item.step)
                self._writer = (item.attempt, item.group)
                if isinstance(run, AppendOnlyRun):
                    self._report_repeated(run)
            if item.step % self._facts.every_steps and not has_evaluation(item.data):
                continue
            batch.append(step_values(item.data, item.time_s, self._facts.layers, self._number_prefix))
        flush()

    def _skip(self, item: StepItem) -> None:
        """Leave out a step that is already written, and note it if a newer worker group recorded it again."""
        if self._writer is not None and (item.attempt, item.group) > self._writer:
            first = item.step if self._repeated is None else min(item.step, self._repeated[0])
            last = item.step if self._repeated is None else max(item.step, self._repeated[1])
            self._repeated = (first, last)

    def _report_repeated(self, run: AppendOnlyRun) -> None:
        if self._repeated is None:
            return
        first, last = self._repeated
        steps = str(first) if first == last else f"{first}-{last}"
        run.note_repeated(steps)
        self._repeated = None
        words = f"step {steps} was" if first == last else f"steps {steps} were"
        self._say("note", words=f"{words} repeated; it keeps the values that were written first")

    def _close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            try:
                run.close()
            except Exception:
                traceback.print_exc()

    def _say(self, kind: str, **fields: object) -> None:
        reply = {"kind": kind, "job_id": self._facts.job_id, "tracker": self._facts.tracker, **fields}
        self._reply(TrackerReply.model_validate(reply))


def _in_words(error: BaseException) -> str:
    """The error's first line, without secrets: libraries quote URLs and headers."""
    lines = str(error).strip().splitlines()
    words = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return hide_secrets(words)[:MAX_WORDS]
