"""Notices a run that lives and gets nowhere: a stuck collective looks healthy to everything else."""

import json
import time

from moe.records import StepRecord
from moe.spec import JobSpec
from moe.storage.folder import Folder
from service.wire.segments import SegmentFolder, WriterFolder

PATIENCE_S = 300.0
SLOWEST_STEPS = 20
"""A step may take this many times as long as the last one, if that is more than the patience."""


class Watchdog:
    """Reads what rank 0 has sealed on storage: the one sign of progress that a frozen process cannot give."""

    def __init__(self, storage: str, attempt: int, spec: JobSpec, patience_s: float = PATIENCE_S) -> None:
        self._metrics = SegmentFolder(Folder.of_job(storage), "metrics")
        self._attempt, self._spec, self._patience_s = attempt, spec, patience_s
        self._seen: tuple[WriterFolder, int] | None = None
        self._since = time.monotonic()
        self._last: StepRecord | None = None
        self._suspected = False

    def stalled(self, group_runs: bool) -> str | None:
        """Reason why the run counts as stuck, or None. Raises OSError when storage cannot be read or written.

        Only between a group's first step and the last, and not where a checkpoint or an evaluation is due: data,
        models, checkpoints and evaluations take what they take. Storage that takes nothing is no sign of a stuck
        run, and what waited for it has until the next look to come.
        """
        now = time.monotonic()
        if not group_runs:
            self._since, self._last, self._suspected = now, None, False
            return None
        self._look(now)
        if self._last is None or self._takes_what_it_takes(self._last.step):
            return None
        patience_s = max(self._patience_s, SLOWEST_STEPS * (self._last.step_s or 0.0))
        if now - self._since <= patience_s:
            self._suspected = False
            return None
        try:
            self._metrics.probe()
        except OSError:
            self._since, self._suspected = now, False
            raise
        if not self._suspected:
            self._suspected = True
            return None
        return f"no step after step {self._last.step} for {now - self._since:.0f} s: the workers are stuck"

    def _takes_what_it_takes(self, step: int) -> bool:
        """Whether something else than a step comes before the metrics of the step after this one."""
        train = self._spec.train
        evaluates = train.evaluation.every_steps
        return (
            step >= train.num_steps
            or step % self._spec.checkpoint.every_steps == 0
            or (evaluates is not None and (step + 1) % evaluates == 0)
        )

    def _look(self, now: float) -> None:
        writers = [
            writer
            for writer in self._metrics.writers()
            if writer.attempt == self._attempt and writer.group >= 0
        ]
        if not writers:
            return
        newest = writers[-1]
        known = self._seen[1] + 1 if self._seen and self._seen[0] == newest else 0
        if self._seen is None or self._seen[0] != newest:
            self._last = None
        segments = self._metrics.segments(newest, known)
        if not segments:
            return
        self._seen, self._since = (newest, segments[-1].number), now
        for segment in segments:
            for line in self._metrics.lines(segment):
                record = json.loads(line)
                if record["kind"] == "metric":
                    self._last = StepRecord.read(record["data"])
