"""Orders of one run, in any batches, with steps that are repeated by newer worker groups."""

import itertools
import json
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.tracker.messages import RunEnd, StepItem, TrackedRun, TrackerOrder, TrackerReply
from service.tracker.run_writer import RunWriter
from tests.processes import DEADLINE_S
from tests.tracker import readers

NUMBERS = itertools.count()
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of libraries that call each other


class Writer:
    """A writer and its replies."""

    def __init__(self, tracker: str, folder: Path, server: str = "", every_steps: int = 1) -> None:
        self.replies = queue.SimpleQueue[TrackerReply]()
        self.job_id, self.tracker, self.folder = f"job-{next(NUMBERS)}", tracker, folder
        folder.joinpath("trackio").mkdir(exist_ok=True)
        server = server or (f"sqlite:///{folder}/mlflow.db" if tracker == "mlflow" else "")
        fields = {"mlflow": {"experiment": "e"}, "trackio": {"project": "shardyard"}, "tensorboard": {}}[tracker]
        spec = {"": {"a//b": 1, "a/_/b": 2}}  # one parameter of MLflow
        self.run = TrackedRun(job_id=self.job_id, tracker=tracker, name="n", labels={"a//b": "1"}, spec=spec,
                              fields=fields, folder=str(folder), server=server, every_steps=every_steps)  # fmt: skip
        self.writer = RunWriter(self.run, self.replies.put)

    @classmethod
    def opened(cls, tracker: str, folder: Path) -> "Writer":
        writer = cls(tracker, folder)
        writer.open()
        return writer

    def open(self) -> TrackerReply:
        self.put(open=self.run)
        reply = self.next()
        assert reply.kind == "opened", reply
        return reply

    def put(self, **fields: Any) -> None:
        self.writer.put(TrackerOrder(job_id=self.job_id, tracker=self.tracker, **fields))

    def next(self) -> TrackerReply:
        return self.replies.get(timeout=DEADLINE_S)

    def write(self, *steps: StepItem, **fields: Any) -> list[TrackerReply]:
        """Replies up to the confirmation."""
        self.put(steps=steps, through=1, **fields)
        replies = [self.next()]
        while replies[-1].kind != "written":
            replies.append(self.next())
        return replies

    def values(self) -> dict[int, list[float]]:
        return readers.read_values(self.tracker, self.folder, self.job_id)


def item(step: int, group: int, late: bool = False, **values: Any) -> StepItem:
    time_s = 1_770_000_000.0 + step + group
    data = json.dumps({"step": step, "loss": group, **values}, separators=(",", ":"))
    return StepItem(step=step, attempt=1, group=group, time_s=time_s, data=data, late=late)


@pytest.fixture(scope="module")
def tracker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracking")
    folder.joinpath("trackio").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        from trackio import sqlite_storage
    sqlite_storage.TRACKIO_DIR = folder / "trackio"  # read once, at the import
    return folder


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(step that a worker group continues after, last step that it records) for each group."""
    groups, reached = [], 0
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, reached))
        reached = draw(st.integers(start, start + 5))
        groups.append((start, reached))
    return groups


@pytest.mark.parametrize("tracker", [pytest.param("mlflow", marks=pytest.mark.slow), "trackio"])
@given(groups=histories(), sizes=st.lists(st.integers(1, 6), min_size=1), reopens=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_each_step_has_one_value(
    tracker: str, tracker_folder: Path, groups: list[tuple[int, int]], sizes: list[int], reopens: bool
) -> None:
    writer, first, newest = Writer.opened(tracker, tracker_folder), dict[int, list[float]](), dict[int, list[float]]()
    items = []
    for group, (start, last) in enumerate(groups):
        for step in range(start + 1, last + 1):
            items.append(item(step, group))
            first.setdefault(step, [float(group)])
            newest = {other: values for other, values in newest.items() if other < step} | {step: [float(group)]}
    for size in itertools.cycle(sizes):
        if not items:
            break
        writer.write(*items[:size])
        items = items[size:]
        if reopens:
            writer.open()
    assert writer.values() == (first if tracker == "mlflow" else newest)


@pytest.mark.slow
def test_repeated_steps_that_keep_their_values_are_noted(tracker_folder: Path) -> None:
    writer = Writer.opened("mlflow", tracker_folder)
    writer.write(*(item(step, 0) for step in range(1, 7)))
    assert [reply.kind for reply in writer.write(*(item(step, 1) for step in range(4, 7)))] == ["written"]
    note, _ = writer.write(item(7, 1))
    assert (note.kind, "4-6" in note.words) == ("note", True)
    client, run = readers.mlflow(tracker_folder, writer.job_id)
    assert client.get_run(run.info.run_id).data.tags["shardyard.repeated_steps"] == "4-6"


def test_late_records_fill_gaps_only(tracker_folder: Path) -> None:
    writer = Writer.opened("trackio", tracker_folder)
    writer.write(*(item(step, 0) for step in (1, 2)), *(item(step, 1) for step in (5, 6)))
    writer.write(item(2, 0, late=True), item(3, 0, late=True), item(4, 0, late=True), item(7, 1))
    assert writer.values() == {1: [0.0], 2: [0.0], 3: [0.0], 4: [0.0], 5: [1.0], 6: [1.0], 7: [1.0]}


def test_some_steps_and_all_evaluations_are_written(tracker_folder: Path) -> None:
    writer = Writer("trackio", tracker_folder, every_steps=4)
    writer.open()
    writer.write(*(item(step, 0) for step in range(1, 10)), item(10, 0, held_out={"a": 1.0}), item(11, 0))
    assert writer.values() == {4: [0.0], 8: [0.0], 10: [0.0]}
    writer.write(*(item(step, 1) for step in range(6, 10)))
    assert writer.values() == {4: [0.0], 8: [1.0]}


def test_after_an_error_nothing_is_written_until_the_run_is_opened(
    tracker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-key")
    writer = Writer.opened("tensorboard", tracker_folder)
    writer.write(item(1, 0))

    def fail(*_: object) -> None:
        raise OSError("no space for https://me:password@host with a-secret-key\nand more")

    with monkeypatch.context() as broken:
        broken.setattr("service.tracker.tensorboard_run.TensorBoardRun.write", fail)
        writer.put(steps=(item(2, 0),), through=2)
        trouble = writer.next()
    assert (trouble.kind, trouble.words) == ("trouble", "OSError: no space for https://***@host with ***")
    writer.put(steps=(item(3, 0),), through=3)
    assert writer.open().last_step == 1
    writer.write(item(2, 0))
    end = RunEnd(outcome="failed", reason="r", step=2, time_s=1.0)
    assert [reply.kind for reply in writer.write(end=end)] == ["written"]
    assert writer.values() == {1: [0.0], 2: [0.0]}


def test_a_run_that_cannot_be_opened_is_given_up_when_it_is_closed(tmp_path: Path) -> None:
    writer = Writer("tensorboard", tmp_path)
    obstacle = tmp_path / "tensorboard"
    obstacle.touch()
    writer.put(open=writer.run)
    assert writer.next().kind == "trouble"
    (thread,) = (thread for thread in threading.enumerate() if thread.name == writer.job_id)
    writer.put(close=True)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.mark.slow
def test_mlflow_server_that_starts_late(tracker_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages contain no token; in the end the server has all steps and the status."""
    from tests.tracker.mlflow_server import MLflowServer, serving

    token = "a-token-of-mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    stopped = MLflowServer(tracker_folder, token)
    stopped.http.server_close()
    writer = Writer("mlflow", tracker_folder, stopped.url)
    writer.put(open=writer.run)
    trouble = writer.next()
    assert (trouble.kind, token in trouble.words) == ("trouble", False)
    with serving(MLflowServer(tracker_folder, token, stopped.http.server_port)) as server:
        while (reply := writer.next()).kind == "trouble":
            pass
        assert (reply.kind, reply.last_step) == ("opened", None)
        _, run = readers.mlflow(tracker_folder, writer.job_id)
        assert reply.place == f"{server.url}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
        writer.write(*(item(step, 0) for step in range(1, 4)))
        server.token = "another token"
        writer.put(steps=(item(4, 0),), through=2)
        assert writer.next().kind == "trouble"
        server.token = token
        assert writer.open().last_step == 3
        writer.write(item(4, 0), end=RunEnd(outcome="failed", reason="r", step=4, time_s=1.0))
    assert writer.values() == {step: [0.0] for step in range(1, 5)}
    assert readers.mlflow(tracker_folder, writer.job_id)[1].info.status == "FAILED"
