"""Runs as the trackers' own libraries read them."""

import json
import sqlite3
import warnings
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

Values = dict[int, list[float]]
"""Values of one name by step, in the order in which they were written."""


def tensorboard(folder: Path, job_id: str) -> Any:
    """EventAccumulator of a job."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [path] = (folder / "tensorboard").glob(f"*-{job_id}")
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def mlflow(folder: Path, job_id: str) -> tuple[Any, Any]:
    """(client, run) of a job."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    [run] = client.search_runs(experiments, filter_string=f"tags.`shardyard.job` = '{job_id}'")
    return client, run


def wandb_files(folder: Path, job_id: str) -> list[Path]:
    """Files of a job's offline runs, oldest first."""
    return sorted((folder / "wandb" / job_id).glob("wandb/offline-run-*/run-*.wandb"))


def trackio(folder: Path, project: str = "shardyard") -> sqlite3.Connection:
    return sqlite3.connect(folder / "trackio" / f"{project}.db")


def read_values(tracker: str, folder: Path, job_id: str, name: str = "train/loss") -> Values:
    """Values of `name` in one tracker."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that use each other's deprecated functions
        return dict(_read_values(tracker, folder, job_id, name))


def _read_values(tracker: str, folder: Path, job_id: str, name: str) -> Values:
    values: Values = defaultdict(list)
    match tracker:
        case "tensorboard":
            accumulator = tensorboard(folder, job_id)
            if name in accumulator.Tags()["scalars"]:
                for event in accumulator.Scalars(name):
                    values[event.step].append(event.value)
        case "mlflow":
            client, run = mlflow(folder, job_id)
            for metric in client.get_metric_history(run.info.run_id, name):
                values[metric.step].append(metric.value)
        case "wandb":
            from service.tracker.wandb_file import read_history

            for path in wandb_files(folder, job_id):
                for row in read_history(path):
                    if name in row:
                        values[row["_step"]].append(row[name])
        case "trackio":
            with closing(trackio(folder)) as database:
                query = "SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id"
                for step, metrics in database.execute(query, (job_id,)):
                    if name in (fields := json.loads(metrics)):
                        values[step].append(fields[name])
    return values
