"""The spool's folder, removed, renamed, closed, replaced or full at any moment: no recorded line is lost or doubled."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe.records import StepRecord
from moe.storage.folder import Folder
from service.run.outbox import Outbox
from service.run.sealer import Sealer, SealTask
from service.run.spool import Seals, Spool
from service.wire.node_folder import make_private, spool_bases, spool_folder
from service.wire.segments import SegmentFolder
from tests.processes import DEADLINE_S, await_that
from tests.procs.recording import recorder

JOB = "job-aaaaaaaaaaaa"
NOBODY = "http://127.0.0.1:9"


def _rename(folder: Path) -> None:
    if os.path.lexists(folder):
        folder.rename(folder.with_name(f"{folder.name}.{os.urandom(4).hex()}"))


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _set_mode(folder: Path, mode: int) -> None:
    if folder.is_dir():
        folder.chmod(mode)


def _make_open(folder: Path) -> None:
    _remove(folder)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)


def _replace(folder: Path, make: Callable[[Path], None]) -> None:
    _rename(folder)
    if folder.parent.is_dir():
        make(folder)


Change = Callable[[Path], None]
REPLACEMENTS: dict[str, Change] = {
    "a file": lambda folder: _replace(folder, Path.touch),
    "a link": lambda folder: _replace(folder, lambda path: path.symlink_to("/nonexistent")),
}
CHANGES: list[Change] = [
    _remove, _rename, _make_open, *REPLACEMENTS.values(),
    lambda folder: _set_mode(folder, 0o777), lambda folder: _set_mode(folder, 0o000),
    lambda folder: folder.unlink() if folder.is_symlink() or folder.is_file() else None,
]  # fmt: skip


STEPS = st.one_of(
    st.just("append"), st.just("append"), st.just("roll"), st.just("seal"), st.just("deliver"),
    st.tuples(st.sampled_from(CHANGES), st.integers(0, 3)),
)  # fmt: skip


@given(steps=st.lists(STEPS, min_size=5, max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_line_is_sealed_and_delivered_once(tmp_path: Path, steps: list[str | tuple[Change, int]]) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as run:
        top, storage = Path(run) / "node", str(Path(run) / "storage" / JOB)
        folder = top / "base" / JOB / "metrics"
        spool = Spool(folder, "jsonl", top)
        seals = Seals(storage, "metrics", "a1.g0")
        outbox = Outbox(spool, "group-0")
        sealer = Sealer([SealTask(folder, seals, spool, outbox)])
        num_appended, delivered_seqs = 0, list[int]()

        def deliver() -> None:
            while lines := outbox.batch():
                delivered_seqs.extend(json.loads(line)["seq"] for line in lines)
                outbox.acknowledge(lines, outbox.next_seq + len(lines))

        for step in steps:
            match step:
                case "append":
                    spool.append(_line)
                    num_appended += 1
                case "roll":
                    spool.roll()
                case "seal":
                    assert sealer._seal(age_s=0.0)
                case "deliver":
                    deliver()
                case (change, depth):
                    with suppress(OSError):  # an earlier change may have left no place for it
                        change([folder, *folder.parents][depth])
        assert sealer._seal(age_s=0.0)
        deliver()
        segments = SegmentFolder(Folder.of_job(storage), "metrics")
        assert delivered_seqs == list(range(num_appended))
        assert [record.seq for w in segments.writers() for record in segments.records(w)] == list(range(num_appended))


def test_a_spool_that_was_removed_is_made_again_with_its_mode(node: Path, tmp_path: Path) -> None:
    storage = str(tmp_path / "storage" / JOB)
    first = recorder(NOBODY, storage, "g0.rank-0")
    first.metric(StepRecord(1))
    shutil.rmtree(spool_bases()[0])
    first.metric(StepRecord(2))
    await_that(lambda: _steps(storage) == [1, 2])
    first.metric(StepRecord(3))
    base = spool_bases()[0]
    assert {oct(path.stat().st_mode & 0o777) for path in (base, *base.rglob("*")) if path.is_dir()} == {"0o700"}
    second = recorder(NOBODY, storage, "driver", attempt=2)
    second.close(patience_s=0.1)
    first.close(patience_s=0.1)
    assert _steps(storage) == [1, 2, 3]


def test_a_spool_of_another_mode_gets_its_own(node: Path) -> None:
    base = spool_bases()[0]
    base.mkdir()
    for mode in (0o755, 0o777, 0o000, 0o500):
        base.chmod(mode)
        assert spool_folder(JOB) == base / JOB
        assert base.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_where_another_holds_its_name_a_spool_takes_the_next(node: Path, replacement: str) -> None:
    REPLACEMENTS[replacement](spool_bases()[0])
    assert spool_folder(JOB) == spool_bases()[1] / JOB


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders to others")
def test_a_folder_of_another_user_is_not_taken(node: Path) -> None:
    base = spool_bases()[0]
    base.mkdir(mode=0o700)
    os.chown(base, 12345, -1)
    assert spool_folder(JOB) == spool_bases()[1] / JOB
    with pytest.raises(PermissionError):
        make_private(base.parent, base / JOB)


def test_a_full_disk_loses_no_line(tmp_path: Path, node: Path) -> None:
    """A limit on the size of files stands for a full disk; storage has none."""
    storage = str(tmp_path / "storage" / JOB)
    code = (
        "import resource, sys, tempfile; tempfile.tempdir = sys.argv[2];"
        "from tests.procs.test_spool_folder import write_beyond; write_beyond(sys.argv[1])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, storage, str(node)],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert _steps(storage) == list(range(1, 51))


def write_beyond(storage: str) -> None:
    """Record 50 steps while no file may exceed 700 bytes, and seal them without that limit."""
    run = recorder(NOBODY, storage, "g0.rank-0")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
    for step in range(1, 51):
        run.metric(StepRecord(step))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run.close(patience_s=5)


def _line(seq: int) -> bytes:
    record = {"seq": seq, "kind": "metric", "time": "2026-01-01T00:00:00.000000Z", "data": {"step": seq}}
    return json.dumps(record).encode() + b"\n"


def _steps(storage: str) -> list[int]:
    folder = SegmentFolder(Folder.of_job(storage), "metrics")
    return [
        record.data["step"] for writer in folder.writers() if writer.group >= 0 for record in folder.records(writer)
    ]
