"""Files of a job that are larger than any run writes: told in words, at no cost of memory or time."""

import json
import os
import tracemalloc
from pathlib import Path

import fsspec
import pytest

from moe.spec import JobSpec
from moe.storage.folder import FileTooLarge, Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.marker import FileSeal
from service.control.jobs.stored_jobs import read_result
from service.wire.segments import MAX_BYTES, SegmentFolder
from tests.refusals import refused
from tests.service.checkpoints import commit
from tests.service.control_plane import spec
from tests.service.test_start_from import Copies, copies

__all__ = ["copies"]
HUGE_BYTES = 1 << 40
"""More than any machine's memory, and as a hole no room on a disk."""


def huge(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, HUGE_BYTES)
    return path


def test_a_result_that_no_driver_has_written_is_none(tmp_path: Path) -> None:
    result = huge(tmp_path / "attempts/1/result.json")
    assert read_result(Folder.of_job(str(tmp_path)), 1) is None
    result.write_text(json.dumps({"outcome": "succeeded", "step": 3}))
    found = read_result(Folder.of_job(str(tmp_path)), 1)
    assert found is not None
    assert found.step == 3


def test_records_end_where_a_segment_is_no_writer_s(tmp_path: Path) -> None:
    record = {"seq": 0, "kind": "metric", "time": "2026-01-31T12:00:00+00:00", "data": {"step": 1, "loss": 2.0}}
    folder = tmp_path / "metrics/a1.g0"
    folder.mkdir(parents=True)
    (folder / "segment-00000000.jsonl").write_text(json.dumps(record) + "\n")
    huge(folder / "segment-00000001.jsonl")
    metrics = SegmentFolder(Folder.of_job(str(tmp_path)), "metrics")
    (writer,) = metrics.writers()
    assert [found.seq for found in metrics.records(writer)] == [0]


def test_a_segment_of_tiny_lines_takes_no_more_room_than_it_has_bytes(tmp_path: Path) -> None:
    record = {"seq": 0, "kind": "log", "time": "2026-01-31T12:00:00+00:00", "data": {}}
    first = json.dumps(record).encode() + b"\n"
    folder = tmp_path / "metrics/a1.g0"
    folder.mkdir(parents=True)
    (folder / "segment-00000000.jsonl").write_bytes(first + b"ab\n" * ((MAX_BYTES // 16 - len(first)) // 3))
    metrics = SegmentFolder(Folder.of_job(str(tmp_path)), "metrics")
    (writer,) = metrics.writers()
    tracemalloc.start()
    try:
        assert [found.seq for found in metrics.records(writer)] == [0]
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES // 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sealed", ["as it was", "as it is"])
def test_a_checkpoint_s_spec_is_no_beginning(copies: Copies, sealed: str) -> None:
    storage = copies.folder / "source"
    name = commit(storage, 4, spec=JobSpec.parse(spec()).model_dump(mode="json"))
    huge(storage / "checkpoints" / name / "spec.json")
    checkpoints = Folder(f"{storage}/checkpoints")
    if sealed == "as it is":
        marker = markers.read(checkpoints, name)
        files = {**marker.files, "spec.json": FileSeal(size_bytes=HUGE_BYTES, sha256="0" * 64)}
        checkpoints.write(name + markers.SUFFIX, marker.model_copy(update={"files": files}).to_bytes())
    step_4 = copies.spec.model_copy(
        update={"start_from": copies.spec.start_from.model_copy(update={"step": 4})}  # type: ignore[union-attr]
    )
    with refused("not_found", "start_from.step", 4):
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
    """Whatever it may have at most: several times a second, several such are read."""
    (tmp_path / "small").write_bytes(b"x" * 4000)
    folder = Folder(str(tmp_path))
    tracemalloc.start()
    try:
        assert len(folder.read("small")) == 4000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
