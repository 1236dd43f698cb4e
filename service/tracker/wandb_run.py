"""Runs of Weights & Biases, online or in files for `wandb sync`."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service.tracker.messages import RunEnd, TrackedRun
from service.tracker.run import AppendOnlyRun
from service.tracker.values import StepValues
from service.tracker.wandb_file import last_step, read_records

INIT_TIMEOUT_S = 60.0
FILE_TIMEOUT_S = 60.0
_EXIT_CODES = {"succeeded": 0, "failed": 1, "cancelled": 255}
"""W&B shows 255, the code of an interrupt, as killed."""


class WandbRun(AppendOnlyRun):
    """A run whose id is the job's, resumed after each restart. W&B only appends: it drops steps below the last one."""

    is_of_process = True

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._folder = Path(run.folder) / "wandb" / run.job_id
        self._is_offline = run.fields["mode"] == "offline"
        self._run: Any = None

    def open(self) -> str:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        written_step = self._step_of_files() if self._is_offline else None
        self._run = wandb.init(
            project=str(self.run.fields["project"]), entity=self.run.fields.get("entity"), id=self.run.job_id,
            name=self.run.name, tags=[f"{key}={value}"[:64] for key, value in self.run.labels.items()],
            config=self.run.spec, dir=str(self._folder), mode="offline" if self._is_offline else "online",
            resume="allow", reinit="create_new", settings=self._settings(),
        )  # fmt: skip
        if not self._is_offline and self._run.step:
            written_step = int(self._run.step) - 1  # the next step that W&B accepts
        self.last_step = written_step
        return str(self._folder) if self._is_offline else str(self._run.url)

    def write(self, points: Sequence[StepValues]) -> None:
        import wandb

        newest: dict[str, float] = {}
        for point in points:
            if self.last_step is not None and point.step <= self.last_step:
                continue
            values: dict[str, Any] = dict(point.scalars)
            if point.samples:
                values["samples"] = wandb.Table(columns=["prompt", "completion"], data=[list(s) for s in point.samples])
            values["_timestamp"] = point.time_s
            self._run.log(values, step=point.step, commit=True)
            self.last_step = point.step
            newest |= point.scalars
        if newest:
            self._run.summary.update(newest)

    def write_system(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Show the present use in the summary: a step that was written accepts no more values."""
        self._run.summary.update(dict(values))

    def set_waiting(self, waiting: bool) -> None:
        """W&B knows running and ended runs only."""

    def note_repeated(self, steps: str) -> None:
        self._run.config.update({"repeated_steps": steps}, allow_val_change=True)

    def end(self, end: RunEnd) -> None:
        self._run.summary.update({**end.scores, "outcome": end.outcome, "reason": end.reason})
        self._run.finish(exit_code=_EXIT_CODES[end.outcome])
        self._run = None
        if self._is_offline:
            self._wait_for_exit_record()

    def close(self) -> None:
        """Leave the run as it is: the process that resumes it, or W&B after minutes of silence, changes its state."""
        self._run = None

    def _wait_for_exit_record(self) -> None:
        """Wait for the file: `finish` returns while W&B's process still writes it."""
        deadline = time.monotonic() + FILE_TIMEOUT_S
        while not self._has_exit_record():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the newest file in {self._folder} is incomplete")
            time.sleep(0.05)

    def _has_exit_record(self) -> bool:
        files = self._files()
        if not files:
            return False
        newest = max(files, key=lambda path: path.stat().st_mtime_ns)
        return any(record.WhichOneof("record_type") == "exit" for record in read_records(newest))

    def _settings(self) -> Any:
        import wandb

        fields: dict[str, Any] = {"base_url": self.run.server} if self.run.server else {}
        # W&B's process would send the newest values as the summary with each step; `write` does so with each page.
        if "x_server_side_derived_summary" in wandb.Settings.model_fields:
            fields["x_server_side_derived_summary"] = True
        return wandb.Settings(
            console="off", disable_git=True, save_code=False, disable_code=True, disable_job_creation=True,
            x_disable_stats=True, x_disable_meta=True, silent=True, init_timeout=INIT_TIMEOUT_S, **fields,
        )  # fmt: skip

    def _step_of_files(self) -> int | None:
        """Last step in the files of this run's earlier processes."""
        steps = [last_step(path) for path in self._files()]
        return max((step for step in steps if step is not None), default=None)

    def _files(self) -> list[Path]:
        return list(self._folder.glob("wandb/offline-run-*/run-*.wandb"))
