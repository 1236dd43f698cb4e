"""Records on their way from a worker to the control plane: late at most, never lost, never doubled."""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from moe.records import StepRecord
from moe.storage.folder import Folder
from service.run.outbox import Outbox
from service.run.recorder import CapturedOutput, SpoolRecorder
from service.run.sender import Sender
from service.run.spool import Spool, local_segments
from service.run.status import status_of
from service.wire.node_folder import spool_folder
from service.wire.run_status import RunStatus
from service.wire.segments import SegmentFolder
from tests.processes import await_that
from tests.procs.receiver import Receiver
from tests.procs.recording import recorder

JOB = "job-aaaaaaaaaaaa"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver().start()
    yield receiver
    receiver.stop()


def record_steps(run: SpoolRecorder, *steps: int) -> None:
    for step in steps:
        run.metric(StepRecord(step))


@pytest.fixture
def storage(tmp_path: Path, node: Path) -> str:
    """Storage of one job, whose processes run on the node."""
    return str(tmp_path / "storage" / JOB)


def test_records_arrive_once_and_in_order_and_leave_nothing_behind(receiver: Receiver, storage: str) -> None:
    run = recorder(receiver.url, storage, "g0.rank-0")
    for step in range(1, 2501):  # more than a batch holds
        run.metric(StepRecord(step, loss=float("nan") if step == 7 else 0.5))
    run.close()
    assert receiver.steps("group-0") == list(range(1, 2501))
    assert receiver.records["group-0"][6]["data"]["loss"] is None
    assert [record.data["step"] for record in _sealed_records(storage, "a1.g0")] == list(range(1, 2501))
    assert list(spool_folder(JOB).iterdir()) == []


def test_records_made_while_nobody_listened_are_delivered_later(receiver: Receiver, storage: str) -> None:
    run = recorder(receiver.url, storage, "g0.rank-0")
    record_steps(run, 1)
    await_that(lambda: receiver.steps("group-0") == [1])
    receiver.stop()
    record_steps(run, *range(2, 50))
    receiver.start()
    await_that(lambda: receiver.steps("group-0") == list(range(1, 50)))
    run.close()


def test_a_run_that_ends_while_nobody_listens_leaves_everything_on_storage(storage: str) -> None:
    worker = recorder(NOBODY, storage, "g0.rank-0")
    record_steps(worker, *range(1, 50))
    worker.close(patience_s=0.1)
    assert [record.seq for record in _sealed_records(storage, "a1.g0")] == list(range(49))
    assert len(local_segments(spool_folder(JOB) / "metrics" / "a1.g0")) == 1  # for the next group to deliver
    driver = recorder(NOBODY, storage, "driver")  # it removes from the node what storage has
    driver.log("info", "over")
    driver.close(patience_s=0.1)
    assert not (spool_folder(JOB) / "metrics").exists()
    assert [record.seq for record in _sealed_records(storage, "a1.g0")] == list(range(49))


NOBODY = "http://127.0.0.1:9"


def test_a_control_plane_that_knows_less_gets_it_again(receiver: Receiver, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "metrics", "jsonl")
    sender = Sender(receiver.url, JOB, 1, "secret", [Outbox(spool, "group-0")])
    sender.start()
    for step in range(1, 20):
        spool.append(_metric(step))
    spool.roll()
    await_that(lambda: len(receiver.steps("group-0")) == 19)
    del receiver.records["group-0"][5:]
    spool.append(_metric(20))
    await_that(lambda: receiver.steps("group-0") == list(range(1, 21)))
    assert sender.close(patience_s=5)


def test_a_refused_writer_stops_sending_and_keeps_sealing(receiver: Receiver, storage: str) -> None:
    run = recorder(receiver.url, storage, "g0.rank-0")
    record_steps(run, 1)
    await_that(lambda: receiver.num_posts > 0)
    receiver.refuses = True
    record_steps(run, 2)
    await_that(lambda: receiver.num_posts > 1)
    posts_when_refused = receiver.num_posts
    record_steps(run, 3)
    run.close()
    assert receiver.num_posts <= posts_when_refused + 1
    assert [record.data["step"] for record in _sealed_records(storage, "a1.g0")] == [1, 2, 3]


def test_a_control_plane_that_lost_the_job_gets_its_records_when_recovered(receiver: Receiver, storage: str) -> None:
    run = recorder(receiver.url, storage, "g0.rank-0")
    record_steps(run, 1)
    await_that(lambda: receiver.steps("group-0") == [1])
    receiver.knows_job = False
    record_steps(run, 2)
    posts = receiver.num_posts
    await_that(lambda: receiver.num_posts > posts + 1)
    receiver.knows_job = True
    await_that(lambda: receiver.steps("group-0") == [1, 2])
    run.close()


def test_requests_statuses_and_the_drivers_silence_travel_with_batches(receiver: Receiver, storage: str) -> None:
    worker, driver = recorder(receiver.url, storage, "g0.rank-0"), recorder(receiver.url, storage, "driver")
    receiver.request = "pause"
    await_that(lambda: worker.control.poll() == "pause")
    worker.report_driver_silence(lambda: 7.04)
    record_steps(worker, 1)
    await_that(lambda: 7.0 in receiver.driver_silent_s)
    driver.report_status(lambda: status_of([]))
    await_that(lambda: bool(receiver.statuses))
    assert RunStatus.model_validate(receiver.statuses[0]).pid == os.getpid()
    for run in (worker, driver):
        run.close()


def test_a_killed_writers_records_are_shipped_by_the_next_group(receiver: Receiver, storage: str) -> None:
    receiver.stop()  # nothing arrives before the kill
    command = [sys.executable, "-m", "tests.procs.recording", receiver.url, storage, tempfile.gettempdir()]
    with subprocess.Popen([*command, "g0.rank-0"], stdout=subprocess.PIPE, text=True) as writer:
        steps = [int(line) for line in islice(writer.stdout, 3000)]
        writer.kill()
        steps += [int(line) for line in writer.stdout.read().split("\n")[:-1]]
    newest = local_segments(spool_folder(JOB) / "metrics" / "a1.g0")[-1]
    with newest.path.open("ab") as file:
        file.write(b'{"seq": 99999, "kind": "met')

    receiver.start()
    run = recorder(receiver.url, storage, "g1.rank-0")
    record_steps(run, 1)
    run.close()
    received_steps = receiver.steps("group-0")
    assert received_steps == list(range(1, len(received_steps) + 1))
    assert len(received_steps) >= steps[-1]  # every step that it printed is kept
    assert receiver.steps("group-1") == [1]
    assert receiver.order[-1] == "group-1"  # the control plane takes nothing of group 0 after it
    assert len(list(_sealed_records(storage, "a1.g0"))) == len(received_steps)
    assert list(spool_folder(JOB).iterdir()) == []


def test_what_the_last_workers_left_is_sealed_by_the_driver_that_ends(storage: str) -> None:
    left = [("logs", "a1.g0.rank-1", "log"), ("metrics", "a1.g0", "jsonl")]
    for kind, writer, suffix in left:
        Spool(spool_folder(JOB) / kind / writer, suffix).append(_metric(1))
    recorder(NOBODY, storage, "driver").close(patience_s=1.0, after_workers=True)
    for kind, writer, _ in left:
        folder = SegmentFolder(Folder(storage), kind)
        [stored_writer] = folder.writers()
        [segment] = folder.segments(stored_writer)
        assert stored_writer.name == writer
        assert folder.read(segment, 0, segment.num_bytes) == _metric(1)(0)
    assert not (Path(tempfile.gettempdir()) / f"shardyard-spool-{os.getuid()}" / JOB).exists()


def test_lines_that_a_process_prints_and_logs_are_kept_once(receiver: Receiver, storage: str) -> None:
    run = recorder(receiver.url, storage, "g0.rank-0")

    def work() -> None:
        with CapturedOutput(run):
            print("printed")
            logging.getLogger("a.library").warning("logged")
            run.log("info", "recorded", step=3)
            print("unfinished", end="")
            raise ZeroDivisionError("what went wrong")

    with pytest.raises(ZeroDivisionError):
        work()
    run.close()
    folder = SegmentFolder(Folder(storage), "logs")
    [writer] = folder.writers()
    text = b"".join(folder.read(segment, 0, segment.num_bytes) for segment in folder.segments(writer)).decode()
    lines = [  # without the sender's own line about its first batch, which comes at any time
        line.split(" ", 1)[1].strip() for line in text.splitlines() if "service.run.sender:" not in line
    ]
    assert lines[:4] == [
        "out     printed", "warning a.library: logged", "info    recorded step=3", "out     unfinished"
    ]  # fmt: skip
    assert lines[-1] == "error   ZeroDivisionError: what went wrong"
    [record] = receiver.records["group-0"]
    assert record["data"] == {"level": "info", "message": "recorded", "step": 3}


def _metric(step: int) -> Callable[[int], bytes]:
    return lambda seq: json.dumps({"seq": seq, "data": {"step": step}}).encode() + b"\n"


def _sealed_records(storage: str, writer: str) -> list:
    folder = SegmentFolder(Folder(storage), "metrics")
    [stored_writer] = [candidate for candidate in folder.writers() if candidate.name == writer]
    for segment in folder.segments(stored_writer):
        for line in folder.read(segment, 0, segment.num_bytes).splitlines():
            json.loads(line)
    return list(folder.records(stored_writer))
