"""Writes the metrics of many steps to MLflow at a small cost per value.

`MlflowClient.log_batch` makes and checks several objects for each value: about 20 µs for a server, and 80 µs for a
database, which also maps each value to a row by itself. A server takes the same request as plain JSON; a database takes
the rows of earlier steps in one statement, and only the newest values pass through the library, which keeps its table
of newest values with them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_REQUEST_ENTITIES = 1000
"""Limit of MLflow's REST API for metrics and tags together."""
LOG_BATCH = "/api/2.0/mlflow/runs/log-batch"


class MetricValue(NamedTuple):
    """A finite value; the fields are those of MLflow's REST API."""

    key: str
    value: float
    timestamp: int
    """Unix time in ms."""
    step: int


def write_metrics(client: Any, run_id: str, values: Sequence[MetricValue], tags: Mapping[str, str]) -> None:
    """Write `values`, and then `tags`. What is stored already stays once. `client`: an `MlflowClient`.

    Raises what the library raises; then any part may be stored, but the tags only after all values.
    """
    store = client._tracking_client.store
    if not hasattr(store, "engine"):  # a server
        _post(store, run_id, values, tags)
        return
    newest: dict[str, MetricValue] = {}
    for value in values:
        if value.key not in newest or value.step >= newest[value.key].step:
            newest[value.key] = value
    older = [value for value in values if newest[value.key] is not value]
    older.sort(key=lambda value: (value.key, value.timestamp, value.step))  # in the order of the table's primary key
    if older and not _insert(store.engine, run_id, older):
        _log(client, run_id, older, {})
    remaining, max_values = list(newest.values()), MAX_REQUEST_ENTITIES - len(tags)
    if len(remaining) > max_values:  # the library would write the tags with the first ones
        _log(client, run_id, remaining[:-max_values], {})
    _log(client, run_id, remaining[-max_values:], tags)


def _post(store: Any, run_id: str, values: Sequence[MetricValue], tags: Mapping[str, str]) -> None:
    from mlflow.utils import rest_utils

    http_request: Any = rest_utils.http_request_safe  # has no types
    max_values = MAX_REQUEST_ENTITIES - len(tags)
    for start in range(0, max(1, len(values)), max_values):
        metrics = [value._asdict() for value in values[start : start + max_values]]
        body: dict[str, Any] = {"run_id": run_id, "metrics": metrics}
        if start + max_values >= len(values):
            body["tags"] = [{"key": key, "value": text} for key, text in tags.items()]
        http_request(store.get_host_creds(), LOG_BATCH, "POST", json=body)


def _insert(engine: Any, run_id: str, values: Sequence[MetricValue]) -> bool:
    """Insert all values as rows; False, with none inserted, if the table does not accept one, such as one it has."""
    from mlflow.store.tracking.dbmodels.models import SqlMetric
    from sqlalchemy import insert
    from sqlalchemy.exc import IntegrityError

    rows = [
        {"run_uuid": run_id, "key": key, "value": value, "timestamp": timestamp, "step": step, "is_nan": False}
        for key, value, timestamp, step in values
    ]
    try:
        with engine.begin() as connection:
            connection.execute(insert(SqlMetric.__table__), rows)
    except IntegrityError:
        return False
    return True


def _log(client: Any, run_id: str, values: Sequence[MetricValue], tags: Mapping[str, str]) -> None:
    from mlflow.entities import Metric, RunTag

    metrics = [Metric(*value) for value in values]
    client.log_batch(run_id, metrics, tags=[RunTag(key, text) for key, text in tags.items()])
