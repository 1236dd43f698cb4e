"""Runs of Trackio, in a local project."""

import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from service.tracker.messages import RunEnd, TrackedRun
from service.tracker.run import RewindableRun
from service.tracker.values import StepValues


class TrackioRun(RewindableRun):
    """A run in the project's SQLite file, written by the library's storage in transactions that are durable on return:
    `trackio.log` would only queue values. Repeated steps replace earlier ones."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._project = str(run.fields["project"])
        self._name = f"{run.name}-{run.job_id}"
        self._config: dict[str, object] | None = {**run.spec, "labels": run.labels}
        """To be written with the next values."""

    def open(self) -> str:
        folder = Path(self.run.folder) / "trackio"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["TRACKIO_DIR"] = str(folder)  # read by the import
        from trackio.sqlite_storage import SQLiteStorage

        SQLiteStorage.init_db(self._project)
        self.last_step = SQLiteStorage.get_max_step_for_run(self._project, run_id=self.run.job_id)
        return f"{folder} (project {self._project}, run {self._name})"

    def write(self, points: Sequence[StepValues]) -> None:
        import trackio

        metrics = []
        for point in points:
            texts = {
                f"samples/{number}": trackio.Markdown(f"**{prompt}**\n\n{completion}")._to_dict()
                for number, (prompt, completion) in enumerate(point.samples, start=1)
            }
            metrics.append({**point.scalars, **texts})
        steps = [point.step for point in points]
        self._log(metrics, steps, [point.time_s for point in points], ["step"] * len(points))
        self.last_step = max(*steps, self.last_step or 0)

    def rewind(self, step: int) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        path = SQLiteStorage.get_project_db_path(self._project)
        with closing(sqlite3.connect(path, timeout=30.0)) as database, database:
            database.execute("DELETE FROM metrics WHERE run_id = ? AND step >= ?", (self.run.job_id, step))
        self.last_step = step - 1

    def write_system(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        SQLiteStorage.bulk_log_system(
            self._project, self._name, [dict(values)], timestamps=[_text(time_s)], run_id=self.run.job_id,
            log_ids=[f"{self.run.job_id}-{step}-system"],
        )  # fmt: skip

    def set_waiting(self, waiting: bool) -> None:
        """Trackio has no state of a run."""

    def end(self, end: RunEnd) -> None:
        self._config = {**self.run.spec, "labels": self.run.labels, "outcome": f"{end.outcome}: {end.reason}"}
        self._log([dict(end.scores)], [end.step], [end.time_s], ["end"])

    def close(self) -> None:
        """Nothing is open between calls."""

    def _log(self, metrics: list[dict[str, object]], steps: list[int], times: list[float], kinds: list[str]) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        log_ids = [f"{self.run.job_id}-{step}-{kind}" for step, kind in zip(steps, kinds, strict=True)]
        SQLiteStorage.bulk_log(
            self._project, self._name, metrics, steps=steps, timestamps=[_text(time_s) for time_s in times],
            config=self._config, log_ids=log_ids, run_id=self.run.job_id,
        )  # fmt: skip
        self._config = None


def _text(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat()
