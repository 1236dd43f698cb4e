"""The limit of a job's log: the newest lines stay, within the limit, and a notice says how many bytes were removed."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.storage.folder import Folder
from service.run.log_limit import NewestSegments, remove_oldest, share_of_writer
from service.run.spool import Seals, Spool

TIME = "2026-01-31T12:00:00.000000Z"
NOTICE_BYTES = 120
_NOTICE = re.compile(rb"([\d,]+) earlier bytes of this log were removed: logs\.max_bytes\n")


def lines(count: int, first: int = 0) -> bytes:
    return b"".join(f"{TIME} out     line {first + index:06d}\n".encode() for index in range(count))


LINE_BYTES = len(lines(1))


def stored_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("segment-*.log")))


@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=12), max_bytes=st.integers(200, 2000))
def test_the_newest_lines_stay(tmp_path_factory: pytest.TempPathFactory, counts: list[int], max_bytes: int) -> None:
    storage = tmp_path_factory.mktemp("storage")
    newest, total = NewestSegments(Folder(str(storage)), max_bytes), 0
    for number, count in enumerate(counts):
        newest.write(f"segment-{number:08d}.log", lines(count, total))
        total += count
    log = stored_bytes(storage)
    assert len(log) <= max_bytes + 2 * NOTICE_BYTES
    notices = [int(number.replace(b",", b"")) for number in _NOTICE.findall(log)]
    bare = b"".join(line for line in log.splitlines(keepends=True) if b" line " in line)
    assert lines(total).endswith(bare), "the newest, without a hole"
    assert bare, "never nothing"
    if len(bare) < total * LINE_BYTES:
        assert notices, "a line says so"
        assert max(notices) >= total * LINE_BYTES - len(bare)
    else:
        assert not notices


def test_a_spool_is_sealed_within_the_limit(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "node", "log", tmp_path)
    seals = Seals(str(tmp_path / "storage"), "logs", "a1.driver", max_bytes=50 * LINE_BYTES)
    for number in range(100):
        spool.append(lambda _seq, number=number: lines(10, 10 * number))  # type: ignore[misc]
        spool.roll()
        for segment in spool.complete():
            seals.seal(segment)
            spool.remove(segment)
    log = stored_bytes(tmp_path / "storage/logs/a1.driver")
    assert log.endswith(lines(40, 960))
    assert len(log) <= 50 * LINE_BYTES + NOTICE_BYTES
    assert _NOTICE.search(log.splitlines(keepends=True)[0])


def test_a_segment_whose_trimming_failed_is_counted_once(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "node", "log", tmp_path)
    seals = Seals(str(tmp_path / "storage"), "logs", "a1.driver", max_bytes=25 * LINE_BYTES)
    stored = tmp_path / "storage/logs/a1.driver"

    def seal(num_lines: int, first: int) -> None:
        spool.append(lambda _seq: lines(num_lines, first))
        spool.roll()
        for segment in spool.complete():
            seals.seal(segment)

    def obstruct(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.mkdir()  # no file can replace it

    seal(10, 0)
    seal(10, 10)
    obstruct(stored / "segment-00000000.log")
    with pytest.raises(OSError, match="segment-00000000"):
        seal(10, 20)  # which removes the oldest
    (stored / "segment-00000000.log").rmdir()
    seal(40, 30)
    obstruct(stored / "segment-00000004.log")
    with pytest.raises(OSError, match="segment-00000004"):
        seal(40, 70)
    (stored / "segment-00000004.log").rmdir()
    seal(10, 110)
    log = stored_bytes(stored)
    bare = b"".join(line for line in log.splitlines(keepends=True) if b" line " in line)
    assert lines(120).endswith(bare)
    assert len(bare) >= 10 * LINE_BYTES
    *_, newest_notice = _NOTICE.findall(log)
    removed_bytes = 120 * LINE_BYTES - len(bare)
    assert (
        removed_bytes <= int(newest_notice.replace(b",", b"")) <= removed_bytes + 2 * NOTICE_BYTES
    )  # two removed notices


def test_what_earlier_attempts_and_groups_logged_is_kept_to_half_the_oldest_going_first(tmp_path: Path) -> None:
    for writer in ("a1.driver", "a1.g0.rank-0", "a2.driver", "a2.g0.rank-0", "a2.g1.rank-0"):
        folder = tmp_path / "logs" / writer
        folder.mkdir(parents=True)
        for number in range(4):
            (folder / f"segment-{number:08d}.log").write_bytes(lines(100))
    remove_oldest(str(tmp_path), attempt=2, num_dead_groups=1, max_bytes=2 * 600 * LINE_BYTES)
    sizes = {folder.name: len(stored_bytes(folder)) // (100 * LINE_BYTES) for folder in (tmp_path / "logs").iterdir()}
    assert sizes == {"a1.driver": 0, "a1.g0.rank-0": 2, "a2.driver": 4, "a2.g0.rank-0": 4, "a2.g1.rank-0": 4}
    for writer, num_lines in (("a1.driver", 400), ("a1.g0.rank-0", 200)):
        (notice,) = _NOTICE.findall(stored_bytes(tmp_path / "logs" / writer))
        assert int(notice.replace(b",", b"")) == num_lines * LINE_BYTES
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.log")}
    remove_oldest(str(tmp_path), attempt=2, num_dead_groups=1, max_bytes=2 * 600 * LINE_BYTES + 1000)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.log")}, "once is enough"


def test_all_shares_together_are_half_of_the_limit() -> None:
    for num_workers in (1, 3, 256):
        assert share_of_writer(1_000_000, num_workers) * (num_workers + 1) <= 500_000
