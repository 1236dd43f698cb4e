"""One run in each tracker, written through the trackers' own libraries and read with them."""

import json
import math
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from service.tracker.messages import RunEnd, TrackedRun
from service.tracker.run import AppendOnlyRun, RewindableRun, TrackerRun
from service.tracker.runs import build_run
from service.tracker.values import StepValues
from tests.tracker import readers

TIME_S = 1_770_000_000.0
FIELDS: dict[str, dict[str, Any]] = {
    "mlflow": {"experiment": "e"},
    "wandb": {"project": "shardyard", "entity": None, "mode": "offline"},
    "tensorboard": {},
    "trackio": {"project": "shardyard"},
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of libraries that call each other
EACH = pytest.mark.parametrize("tracker", [
    pytest.param("mlflow", marks=pytest.mark.slow), pytest.param("wandb", marks=pytest.mark.slow), "tensorboard",
    "trackio",
])  # fmt: skip


def facts(tracker: str, folder: Path) -> TrackedRun:
    server = f"sqlite:///{folder}/mlflow.db" if tracker == "mlflow" else ""
    return TrackedRun(
        job_id=job_of(folder), tracker=tracker, name="n", labels={"team": "research"}, spec={"train": {"num_steps": 9}},
        fields=FIELDS[tracker], folder=str(folder), server=server,
    )  # fmt: skip


def job_of(folder: Path) -> str:
    """Id of the folder's job: W&B opens each run once in a process."""
    return f"job-{folder.name}"


def points(first: int, last: int, factor: float = 1.0) -> list[StepValues]:
    return [StepValues(step, TIME_S + step, {"train/loss": factor * step, "speed/step_s": 0.5})
            for step in range(first, last + 1)]  # fmt: skip


@pytest.fixture
def tracker_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("tracking")
    if (storage := sys.modules.get("trackio.sqlite_storage")) is not None:
        monkeypatch.setattr(storage, "TRACKIO_DIR", folder / "trackio")  # read once, at the import
    return folder


def open_run(tracker: str, folder: Path) -> TrackerRun:
    if tracker == "trackio":
        folder.joinpath("trackio").mkdir(exist_ok=True)
    run = build_run(facts(tracker, folder))
    run.open()
    return run


def finish(run: TrackerRun, **changes: Any) -> None:
    end = {"outcome": "succeeded", "reason": "done", "step": 6, "time_s": TIME_S + 9, "scores": {"final/loss": 0.5}}
    run.end(RunEnd(**{**end, **changes}))


@EACH
def test_a_run_is_continued_after_the_last_step_it_has(tracker: str, tracker_folder: Path) -> None:
    run = open_run(tracker, tracker_folder)
    assert run.last_step is None
    run.write(points(1, 2))
    run.write(points(3, 3))
    assert run.last_step == 3
    if tracker == "wandb":
        finish(run)  # what W&B has not written to its file is lost with its process
    continued = open_run(tracker, tracker_folder)  # the first one's process was killed: it is not closed
    assert continued.last_step == 3
    continued.write(points(4, 6))
    finish(continued)
    assert readers.read_values(tracker, tracker_folder, job_of(tracker_folder)) == {
        step: [float(step)] for step in range(1, 7)
    }
    if tracker != "wandb":  # whose scores are in its summary
        assert readers.read_values(tracker, tracker_folder, job_of(tracker_folder), "final/loss") == {6: [0.5]}


@pytest.mark.parametrize("tracker", ["tensorboard", "trackio"])
def test_repeated_steps_replace_earlier_ones(tracker: str, tracker_folder: Path) -> None:
    run = open_run(tracker, tracker_folder)
    run.write(points(1, 5))
    assert isinstance(run, RewindableRun)
    run.rewind(3)
    run.write(points(3, 4, factor=10.0))
    run.close()
    assert readers.read_values(tracker, tracker_folder, job_of(tracker_folder)) == {
        1: [1.0],
        2: [2.0],
        3: [30.0],
        4: [40.0],
    }
    assert open_run(tracker, tracker_folder).last_step == 4


@pytest.mark.parametrize("tracker", [pytest.param("mlflow", marks=pytest.mark.slow), "trackio"])
def test_what_is_sent_twice_is_stored_once(tracker: str, tracker_folder: Path) -> None:
    run = open_run(tracker, tracker_folder)
    for _ in range(2):
        run.write(points(1, 3))
        finish(run)
        run = open_run(tracker, tracker_folder)
    assert readers.read_values(tracker, tracker_folder, job_of(tracker_folder)) == {1: [1.0], 2: [2.0], 3: [3.0]}
    assert readers.read_values(tracker, tracker_folder, job_of(tracker_folder), "final/loss") == {6: [0.5]}


@pytest.mark.slow
def test_mlflow_gets_what_its_own_client_writes(tracker_folder: Path) -> None:
    """Pages with gaps, steps out of order and a part that is stored already, against `MlflowClient.log_batch`."""
    from mlflow.entities import Metric

    pages = [
        [StepValues(step, TIME_S + step, {"a/x": 0.1 * step, **({"b": -1.5 * step} if step % 3 == 0 else {})})
         for step in steps]
        for steps in ((1, 2, 3, 4), (4, 7, 8), (3, 4, 7, 5, 6), (9,))
    ]  # fmt: skip
    run = open_run("mlflow", tracker_folder)
    for page in pages:
        run.write(page)
    client, stored = readers.mlflow(tracker_folder, job_of(tracker_folder))
    reference = client.create_run(stored.info.experiment_id).info.run_id
    for point in (point for page in pages for point in page):
        metrics = [Metric(name, value, int(point.time_s * 1000), point.step) for name, value in point.scalars.items()]
        client.log_batch(reference, metrics)
    assert client.get_run(reference).data.metrics == stored.data.metrics == {"a/x": 0.9, "b": -13.5}
    assert stored.data.tags["shardyard.step"] == "9"
    for name in ("a/x", "b"):
        own, by_library = (
            sorted((m.step, m.timestamp, m.value) for m in client.get_metric_history(run_id, name))
            for run_id in (stored.info.run_id, reference)
        )
        assert own == by_library
        assert len(own) == len({step for step, *_ in own}) >= 3


@pytest.mark.slow
def test_mlflow_gets_more_metrics_at_once_than_a_request_holds(tracker_folder: Path) -> None:
    run = open_run("mlflow", tracker_folder)
    scalars = {f"layer-{number}": 0.5 * number for number in range(1, 1202)}
    run.write([StepValues(step, TIME_S + step, scalars) for step in (1, 2)])
    client, stored = readers.mlflow(tracker_folder, job_of(tracker_folder))
    assert stored.data.metrics == scalars
    assert stored.data.tags["shardyard.step"] == "2"
    assert [metric.step for metric in client.get_metric_history(stored.info.run_id, "layer-1201")] == [1, 2]


@pytest.mark.slow
def test_mlflow_has_status_params_tags_and_samples(tracker_folder: Path) -> None:
    run = open_run("mlflow", tracker_folder)
    run.write([StepValues(1, TIME_S, {f"layer_{layer}/x": 1.0 for layer in range(1500)}, (("prompt", "completion"),))])
    run.set_waiting(True)
    client, stored = readers.mlflow(tracker_folder, job_of(tracker_folder))
    assert (stored.info.status, stored.info.run_name) == ("SCHEDULED", "n")
    assert stored.data.params["train.num_steps"] == "9"
    assert stored.data.tags["team"] == "research"
    assert len(stored.data.metrics) == 1500
    path = client.download_artifacts(stored.info.run_id, "samples/step-00000001.txt")
    assert Path(path).read_text() == "prompt\n---\ncompletion"
    for outcome, status in (("failed", "FAILED"), ("cancelled", "KILLED"), ("succeeded", "FINISHED")):
        run = open_run("mlflow", tracker_folder)
        assert readers.mlflow(tracker_folder, job_of(tracker_folder))[1].info.status == "RUNNING"
        finish(run, outcome=outcome)
        assert readers.mlflow(tracker_folder, job_of(tracker_folder))[1].info.status == status


@pytest.mark.slow
def test_wandb_has_config_tags_summary_and_exit_code(tracker_folder: Path) -> None:
    from service.tracker.wandb_file import read_records

    run = open_run("wandb", tracker_folder)
    run.write([StepValues(1, TIME_S, {"train/loss": 1.0}, (("prompt", "completion"),))])
    assert isinstance(run, AppendOnlyRun)
    run.note_repeated("3-4")
    finish(run, outcome="cancelled")
    [path] = readers.wandb_files(tracker_folder, job_of(tracker_folder))
    records = list(read_records(path))
    [first] = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert (first.run_id, first.display_name, list(first.tags)) == (job_of(tracker_folder), "n", ["team=research"])
    config = {update.key: json.loads(update.value_json) for update in first.config.update}
    assert config["train"] == {"num_steps": 9}
    summary = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in records if record.WhichOneof("record_type") == "summary" for item in record.summary.update
    }  # fmt: skip
    assert (summary["final/loss"], summary["outcome"]) == (0.5, "cancelled")
    assert summary["train/loss"] == 1.0
    [exit_record] = [record.exit for record in records if record.WhichOneof("record_type") == "exit"]
    assert exit_record.exit_code == 255
    [table] = (path.parent / "files/media/table").glob("samples*.json")
    assert json.loads(table.read_text())["data"] == [["prompt", "completion"]]


def test_tensorboard_has_spec_labels_samples_and_outcome(tracker_folder: Path) -> None:
    run = open_run("tensorboard", tracker_folder)
    run.write([StepValues(2, TIME_S, {"train/loss": math.pi}, (("prompt", "completion"),))])
    run.write_system(2, TIME_S, {"system/gpu_memory_bytes": 8.0})
    finish(run)
    accumulator = readers.tensorboard(tracker_folder, job_of(tracker_folder))
    texts = {
        name.removesuffix("/text_summary"): accumulator.Tensors(name)[0].tensor_proto.string_val[0].decode()
        for name in accumulator.Tags()["tensors"]
    }
    assert json.loads(texts["spec"].strip("`").removeprefix("json")) == {"train": {"num_steps": 9}}
    assert (texts["labels"], texts["samples/1"]) == ("team: research", "**prompt**\n\ncompletion")
    assert texts["outcome"].startswith("succeeded at step 6")
    assert [event.wall_time for event in accumulator.Scalars("train/loss")] == [TIME_S]
    assert [event.value for event in accumulator.Scalars("system/gpu_memory_bytes")] == [8.0]


def test_trackio_has_config_samples_and_outcome(tracker_folder: Path) -> None:
    run = open_run("trackio", tracker_folder)
    run.write([StepValues(2, TIME_S, {"train/loss": 1.5}, (("prompt", "completion"),))])
    run.write_system(2, TIME_S, {"system/gpu_memory_bytes": 8.0})
    finish(run)
    with closing(readers.trackio(tracker_folder)) as database:
        [(text, name)] = database.execute("SELECT config, run_name FROM configs").fetchall()
        [(system,)] = database.execute("SELECT metrics FROM system_metrics").fetchall()
        [(metrics,)] = database.execute("SELECT metrics FROM metrics WHERE step = 2").fetchall()
    config = json.loads(text)
    assert (config["train"], config["labels"], name) == (
        {"num_steps": 9},
        {"team": "research"},
        f"n-{job_of(tracker_folder)}",
    )
    assert config["outcome"] == "succeeded: done"
    assert json.loads(system) == {"system/gpu_memory_bytes": 8.0}
    assert json.loads(metrics)["samples/1"] == {"_type": "trackio.markdown", "_value": "**prompt**\n\ncompletion"}
