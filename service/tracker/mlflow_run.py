"""Runs of MLflow, in a tracking server or database."""

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from service.tracker.credentials import without_credentials
from service.tracker.messages import RunEnd, TrackedRun
from service.tracker.mlflow_metrics import MetricValue, write_metrics
from service.tracker.run import AppendOnlyRun
from service.tracker.values import StepValues

JOB_TAG, STEP_TAG, REPEATED_TAG = "shardyard.job", "shardyard.step", "shardyard.repeated_steps"
"""Tags of a run: its job, the last step that was written, and repeated steps that keep their first values."""
MAX_BATCH_PARAMS, MAX_PARAM_CHARACTERS = 100, 6000
"""Limits of MLflow's REST API."""
_STATUSES = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_\-. :/]")
_CREATION = threading.Lock()
"""Held while a database may get its tables, which MLflow creates unguarded."""


class MLflowRun(AppendOnlyRun):
    """A run, found again by its job's tag. MLflow keeps all values of a step, except repetitions of the same value with
    the same time; so what was sent twice is stored once."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._client: Any = None
        self._run_id = ""

    def open(self) -> str:
        from mlflow.entities import RunStatus
        from mlflow.tracking import MlflowClient

        with _CREATION:
            self._client = MlflowClient(tracking_uri=self.run.server)
            experiment_id = self._experiment_id(str(self.run.fields["experiment"]))
        stored_runs = self._client.search_runs([experiment_id], filter_string=f"tags.`{JOB_TAG}` = '{self.run.job_id}'")
        if stored_runs:
            stored_run = stored_runs[0]
            step = stored_run.data.tags.get(STEP_TAG)
            self.last_step = None if step is None else int(step)
        else:
            tags = {**{_key(name): value for name, value in self.run.labels.items()}, JOB_TAG: self.run.job_id}
            stored_run = self._client.create_run(experiment_id, run_name=self.run.name, tags=tags)
        self._run_id = stored_run.info.run_id
        self._log_params(set(stored_run.data.params))
        if stored_run.info.status != RunStatus.to_string(RunStatus.RUNNING):
            self._client.update_run(self._run_id, status="RUNNING")
        server = without_credentials(self.run.server).rstrip("/")
        if not server.startswith("http"):
            return f"{server} (run {self._run_id})"
        return f"{server}/#/experiments/{experiment_id}/runs/{self._run_id}"

    def write(self, points: Sequence[StepValues]) -> None:
        for point in points:
            if point.samples:
                text = "\n\n".join(f"{prompt}\n---\n{completion}" for prompt, completion in point.samples)
                self._client.log_text(self._run_id, text, f"samples/step-{point.step:08d}.txt")
        values = [
            MetricValue(_key(name), value, int(point.time_s * 1000), point.step)
            for point in points for name, value in point.scalars.items()
        ]  # fmt: skip
        last_step = max(self.last_step or 0, *(point.step for point in points))
        write_metrics(self._client, self._run_id, values, {STEP_TAG: str(last_step)})
        self.last_step = last_step

    def write_system(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(_key(name), value, int(time_s * 1000), step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics)

    def set_waiting(self, waiting: bool) -> None:
        self._client.update_run(self._run_id, status="SCHEDULED" if waiting else "RUNNING")

    def note_repeated(self, steps: str) -> None:
        self._client.set_tag(self._run_id, REPEATED_TAG, steps)

    def end(self, end: RunEnd) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_key(name), value, int(end.time_s * 1000), end.step) for name, value in end.scores.items()
        ]  # fmt: skip
        if metrics:
            self._client.log_batch(self._run_id, metrics)
        self._client.set_tag(self._run_id, "shardyard.reason", end.reason)
        self._client.set_terminated(self._run_id, _STATUSES[end.outcome], end_time=int(end.time_s * 1000))

    def close(self) -> None:
        self._client = None

    def _experiment_id(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        if (experiment := self._client.get_experiment_by_name(name)) is not None:
            return str(experiment.experiment_id)
        # A server has a place of its own for artifacts; a database's default is the current folder.
        artifacts = None
        if not self.run.server.startswith("http"):
            artifacts = (Path(self.run.folder) / "mlflow-artifacts" / name).as_uri()
        try:
            return str(self._client.create_experiment(name, artifact_location=artifacts))
        except MlflowException:  # another job has just created it
            if (experiment := self._client.get_experiment_by_name(name)) is not None:
                return str(experiment.experiment_id)
            raise

    def _log_params(self, stored: set[str]) -> None:
        """Log the spec's fields by path. Parameters cannot change, and a job's spec does not."""
        from mlflow.entities import Param

        texts: dict[str, str] = {}
        for path, text in _flat("", self.run.spec):
            texts.setdefault(_key(path), text[:MAX_PARAM_CHARACTERS])  # MLflow refuses one name with two values
        params = [Param(name, text) for name, text in texts.items() if name not in stored]
        for start in range(0, len(params), MAX_BATCH_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_BATCH_PARAMS])


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), entry)
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)


@lru_cache(maxsize=4096)
def _key(name: str) -> str:
    """Name as MLflow allows it: also a path that is its own normal form."""
    parts = _FORBIDDEN.sub("_", name)[:250].split("/")
    return "/".join(part if part not in ("", ".", "..") else "_" for part in parts)
