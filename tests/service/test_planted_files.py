"""Links planted in a job's folder lead nowhere, and files larger than any run writes cost no memory or time."""

import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
import torch
from pydantic import SecretStr

from moe.parallel import Layout
from moe.plan import Cluster, plan_job
from moe.spec import JobSpec
from moe.storage.folder import FileTooLarge, Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.checkpointer import Checkpointer, CheckpointError
from moe.train.checkpoint.copying import copy_checkpoint
from moe.train.checkpoint.marker import FileSeal
from moe.train.recorder import MemoryRecorder
from service.control.jobs.roots import StorageRoots
from service.control.jobs.stored_jobs import read_result
from service.control.scheduling.new_jobs import _write_spec
from service.run.spool import Seals, Spool
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Launch, Result
from service.wire.segments import MAX_BYTES, SegmentFolder
from tests.refusals import expect_problem
from tests.service.checkpoints import commit
from tests.service.control_plane import spec
from tests.service.test_start_from import Copies, copies

JOB = JobSpec.parse(spec())
PLAN = plan_job(JOB, Cluster(num_nodes=1, devices_per_node=2, device="cpu", memory_bytes=8 << 30), 1)


def launch(storage: Path) -> Launch:
    return Launch(
        job_id=storage.name, attempt=1, spec=JOB, plan=PLAN, gpus_per_worker=0, storage=str(storage),
        cache="/cache", events_url="http://127.0.0.1:9", token=SecretStr("0123456789abcdef"), max_failures=3,
    )  # fmt: skip


def seal(storage: Path) -> None:
    spool = Spool(storage.parent / "node", "log")
    spool.append(lambda _line: b"a line\n")
    spool.roll()
    for segment in spool.complete():
        Seals(str(storage), "logs", "a1.driver").seal(segment)


def copy(storage: Path) -> None:
    commit(storage.parent / "other", 5)
    source = Folder(str(storage.parent / "other/checkpoints"))
    marker = markers.read(source, "step-00000005.a1.g0")
    copy_checkpoint(source, marker, Folder.of_job(str(storage)).subfolder("checkpoints"))


PID = os.getpid()
WRITERS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a probe": (
        lambda storage: SegmentFolder(Folder.of_job(str(storage)), "metrics").probe(), ["metrics/.probe", "metrics"],
    ),
    "a launch": (
        lambda storage: AttemptFolder(str(storage), 1).write_launch(launch(storage)),
        [f"attempts/1/launch.json.{PID}.tmp", "attempts/1", "attempts"],
    ),
    "a plan": (
        lambda storage: AttemptFolder(str(storage), 1).write_chosen_plan(PLAN),
        [f"attempts/1/plan.json.{PID}.tmp", "attempts/1/plan.json", "attempts/1"],
    ),
    "a result": (
        lambda storage: AttemptFolder(str(storage), 1).write_result(Result(outcome="succeeded", step=5)),
        [f"attempts/1/result.json.{PID}.tmp", "attempts/1/result.json", "attempts"],
    ),
    "a segment": (
        seal,
        [f"logs/a1.driver/.segment-00000000.log.{PID}", "logs/a1.driver/segment-00000000.log", "logs/a1.driver"],
    ),
    "a spec": (
        lambda storage: _write_spec(StorageRoots([str(storage.parent)]), str(storage), "{}", None), ["spec.json"],
    ),
    "a checkpoint": (copy, [
        "checkpoints/step-00000005.a0.g0/__0_0.distcp",
        f"checkpoints/step-00000005.a0.g0.commit.json.{PID}.tmp", "checkpoints",
    ]),
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_through_a_link(tmp_path: Path, writer: str) -> None:
    write, places = WRITERS[writer]
    for number, place in enumerate(places):
        folder = tmp_path / str(number)
        storage, key, elsewhere = folder / "job", folder / "attempt.key", folder / "elsewhere"
        elsewhere.mkdir(parents=True)
        key.write_text("secret")
        is_folder = "." not in Path(place).name.removeprefix("a1.")
        (storage / place).parent.mkdir(parents=True)
        (storage / place).symlink_to(elsewhere if is_folder else key)
        try:
            write(storage)
        except OSError:
            assert is_folder, place
        assert key.read_text() == "secret", place
        assert list(elsewhere.iterdir()) == [], place


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_where_a_job_s_own_folder_was_swapped_for_a_link(tmp_path: Path, writer: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "job").symlink_to(elsewhere)
    with pytest.raises(Exception, match="Not a directory"):
        WRITERS[writer][0](tmp_path / "job")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("keep", [1, 5])
def test_a_save_removes_nothing_of_a_job_that_a_link_leads_to(tmp_path: Path, keep: int) -> None:
    """Neither the marker with the saved checkpoint's name, nor checkpoints beyond `keep`."""
    storage, neighbour = tmp_path / "job", tmp_path / "neighbour"
    for step in (3, 5):
        commit(neighbour, step)
    before = {path: path.read_bytes() for path in neighbour.rglob("*") if path.is_file()}
    storage.mkdir()
    (storage / "checkpoints").symlink_to(neighbour / "checkpoints")
    recorder = MemoryRecorder()
    checkpointer = Checkpointer(
        Folder.of_job(str(storage)).subfolder("checkpoints"), Layout.single(), {"weight": torch.ones(3)},
        attempt=1, group=0, keep=keep, files={}, recorder=recorder,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="step-00000005"):
        checkpointer.save(5, b"{}")
    assert {path: path.read_bytes() for path in neighbour.rglob("*") if path.is_file()} == before


def test_storage_behind_a_chain_of_links_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    for number in range(2000):
        (tmp_path / f"{number + 1}").symlink_to(f"{number}")
    roots = StorageRoots([str(tmp_path)])
    assert roots.job_folder(str(tmp_path / "40"), "job-x") == f"{tmp_path}/0/job-x"
    with expect_problem("unreadable", "storage"):
        roots.job_folder(str(tmp_path / "2000"), "job-x")


MALFORMED_PATHS = ("relative/path", "zip::file:///x", "/a?b", "/a\u202eb")


def test_a_malformed_storage_has_another_code_than_one_outside(tmp_path: Path) -> None:
    for code, storages in (("invalid_value", MALFORMED_PATHS), ("not_allowed", ("/somewhere/else", "/a/../b"))):
        for storage in storages:
            with expect_problem(code, "storage", storage):
                StorageRoots([str(tmp_path)]).job_folder(storage, "job-x")


def test_of_what_lies_outside_the_roots_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "root" / "way-out").symlink_to("../loop")
    roots, rules = StorageRoots([str(tmp_path / "root")]), set()
    for path in ("loop", "loop/below", "missing", "missing/below", "x/" * 100, "root/way-out"):
        with expect_problem("not_allowed", "storage") as error:
            roots.job_folder(str(tmp_path / path), "job-x")
        rules |= {problem.rule for problem in error.value.problems}
    assert rules == {"must be under a storage root of this service"}


def test_a_launch_that_was_altered_is_not_taken(tmp_path: Path) -> None:
    original, folder = launch(tmp_path / "job"), AttemptFolder(str(tmp_path / "job"), 1)
    path = folder.write_launch(original)
    assert AttemptFolder.open_launch(path)[1] == original
    assert Path(path).stat().st_mode & 0o777 == 0o600
    other_path = folder.write_launch(original.model_copy(update={"max_failures": 2}))
    assert other_path != path  # a driver that has begun still finds its own launch
    Path(path).write_text(Path(path).read_text().replace('"data_roots": []', '"data_roots": ["/"]'))
    with pytest.raises(ValueError, match="was modified after it was written"):
        AttemptFolder.open_launch(path)
    with pytest.raises(ValueError, match="must be named as write_launch names it"):
        AttemptFolder.open_launch(f"{tmp_path}/job/attempts/1/launch.json")


__all__ = ["copies"]
HUGE_BYTES = 1 << 40
"""More than any machine's memory; as a sparse file it takes no disk space."""


def huge(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, HUGE_BYTES)
    return path


def test_a_result_that_no_driver_has_written_is_none(tmp_path: Path) -> None:
    result = huge(tmp_path / "attempts/1/result.json")
    assert read_result(Folder.of_job(str(tmp_path)), 1) is None
    result.write_text(json.dumps({"outcome": "succeeded", "step": 3}))
    stored_result = read_result(Folder.of_job(str(tmp_path)), 1)
    assert stored_result.step == 3


def write_records(storage: Path, first: bytes, rest: bytes = b"") -> Path:
    """Write a writer's first segment: one record, and the rest."""
    folder = storage / "metrics/a1.g0"
    folder.mkdir(parents=True)
    (folder / "segment-00000000.jsonl").write_bytes(first + rest)
    return folder


def seqs(storage: Path) -> list[int]:
    metrics = SegmentFolder(Folder.of_job(str(storage)), "metrics")
    (writer,) = metrics.writers()
    return [record.seq for record in metrics.records(writer)]


RECORD = json.dumps({"seq": 0, "kind": "log", "time": "2026-01-31T12:00:00+00:00", "data": {}}).encode() + b"\n"


@contextmanager
def trace_memory() -> Iterator[Callable[[], int]]:
    """Trace Python's memory; yields a function that returns its peak in bytes."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_records_end_where_a_segment_is_no_writer_s(tmp_path: Path) -> None:
    huge(write_records(tmp_path, RECORD) / "segment-00000001.jsonl")
    assert seqs(tmp_path) == [0]


def test_a_segment_of_tiny_lines_takes_no_more_room_than_it_has_bytes(tmp_path: Path) -> None:
    write_records(tmp_path, RECORD, b"ab\n" * ((MAX_BYTES // 16 - len(RECORD)) // 3))
    with trace_memory() as most_bytes:
        assert seqs(tmp_path) == [0]
        assert most_bytes() < MAX_BYTES // 4


@pytest.mark.parametrize("seal_state", ["as it was", "as it is"])
def test_a_checkpoint_s_spec_is_no_beginning(copies: Copies, seal_state: str) -> None:
    storage = copies.folder / "source"
    name = commit(storage, 4, spec=JobSpec.parse(spec()).model_dump(mode="json"))
    huge(storage / "checkpoints" / name / "spec.json")
    checkpoints = Folder(f"{storage}/checkpoints")
    if seal_state == "as it is":
        marker = markers.read(checkpoints, name)
        files = {**marker.files, "spec.json": FileSeal(size_bytes=HUGE_BYTES, sha256="0" * 64)}
        checkpoints.write(name + markers.SUFFIX, marker.model_copy(update={"files": files}).to_bytes())
    step_4 = copies.spec.model_copy(
        update={"start_from": copies.spec.start_from.model_copy(update={"step": 4})}  # type: ignore[union-attr]
    )
    with expect_problem("not_found", "start_from.step", 4):
        copies.warm_starts.look_up(step_4, "me")


def test_a_read_takes_no_more_than_it_may_of_any_storage(tmp_path: Path) -> None:
    huge(tmp_path / "huge")
    fsspec.filesystem("memory").pipe_file("/large-files/huge", b"x" * 1000)
    for url, max_bytes in ((str(tmp_path), 1 << 20), ("memory://large-files", 999)):
        folder = Folder(url)
        for end in (None, HUGE_BYTES):
            with pytest.raises(FileTooLarge, match=f"huge has more than {max_bytes:,} bytes"):
                folder.read("huge", 0, end, max_bytes=max_bytes)
        assert len(folder.read("huge", 1, 100, max_bytes=max_bytes)) == 99
    assert len(Folder("memory://large-files").read("huge", 1, HUGE_BYTES, max_bytes=999)) == 999


def test_a_small_file_takes_a_small_room(tmp_path: Path) -> None:
    """Whatever its size limit: several such files are read several times a second."""
    (tmp_path / "small").write_bytes(b"x" * 4000)
    with trace_memory() as most_bytes:
        assert len(Folder(str(tmp_path)).read("small")) == 4000
        assert most_bytes() < 1 << 20
