"""Queries of a log: the newest lines, those since a time, those with a text; combined, and while the log grows."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.storage.folder import Folder
from service.client.log_lines import LogQuery
from service.control.report.logs import LogChoice, LogLine, LogReader
from service.control.store.clock import to_us
from service.wire.events import rfc3339
from service.wire.segments import Segment, SegmentFolder
from service.wire.since import parse_since
from tests.service.control_plane import ControlPlane
from tests.service.silent_run import Run
from tests.service.test_streams import write_log
from tests.service_cli.command import shardyard

BEGAN = datetime(2026, 1, 31, 12, tzinfo=UTC)
WRITERS = ["a1.driver", "a1.g0.rank-0", "a1.g0.rank-1", "a2.g0.rank-0"]


def time_at(seconds: float) -> str:
    return rfc3339(BEGAN + timedelta(seconds=seconds))


words = st.sampled_from(["step", "loss", "(a+)+$", ".*", "é☃", ""])
segments = st.lists(st.lists(st.tuples(st.integers(0, 3), words), min_size=1, max_size=5), max_size=6)
"""Segments of one writer: lists of (seconds since the line before, word); 0 is a line without a time."""


def write_logs(storage: Path, logs: dict[str, list[list[tuple[int, str]]]]) -> list[tuple[int, str, str]]:
    """(time, writer, line) of every line, in the order of writers and lines."""
    entries = []
    for writer in sorted(logs):
        seconds = 0
        for number, lines in enumerate(logs[writer]):
            text = ""
            for place, (pause, word) in enumerate(lines):
                seconds += pause
                line = f"{time_at(seconds)} info {word}" if pause or not (number or place) else f"  {word}"
                text += line + "\n"
                entries.append((to_us(BEGAN + timedelta(seconds=seconds)), writer, line))
            write_log(storage, writer, number, text)
    return entries


def read(portions: Iterator[list[LogLine]]) -> list[tuple[int, str, str]]:
    return [(line.time, line.writer.name, line.text) for portion in portions for line in portion]


@given(
    logs=st.dictionaries(st.sampled_from(WRITERS), segments, max_size=4),
    since=st.one_of(st.none(), st.integers(-1, 30)),
    grep=words,
    tail=st.integers(0, 12),
)
def test_of_any_log_what_is_chosen_of_it(
    tmp_path_factory: pytest.TempPathFactory,
    logs: dict[str, list[list[tuple[int, str]]]],
    since: int | None,
    grep: str,
    tail: int,
) -> None:
    storage = tmp_path_factory.getbasetemp() / secrets.token_hex(8)
    since_us = 0 if since is None else to_us(BEGAN + timedelta(seconds=since))
    selection = [line for line in write_logs(storage, logs) if line[0] >= since_us and grep in line[2]]
    folder, choice = SegmentFolder(Folder(str(storage)), "logs"), LogChoice(since=since_us, grep=grep)
    in_turns = read(LogReader(folder, choice).lines())
    assert sorted(in_turns, key=lambda line: line[1]) == selection
    reader = LogReader(folder, choice)
    newest = sorted(selection, key=lambda line: line[0])
    assert read(reader.newest(tail)) == newest[len(newest) - min(tail, len(newest)) :]
    assert read(reader.lines()) == []  # goes on from the end
    write_log(storage, "a3.driver", 0, f"{time_at(1000)} info {grep}\n")
    assert len(read(reader.lines())) == 1


@contextmanager
def small_blocks() -> Iterator[None]:
    """Sizes at which logs of some hundred bytes are long, and lines of forty."""
    sizes = {"BLOCK_BYTES": 40, "MAX_LINE_BYTES": 40, "ROUND_BYTES": 100, "TAIL_BYTES": 50}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, num_bytes in sizes.items():
            monkeypatch.setattr(f"service.control.report.logs.{name}", num_bytes)
        yield


lines_of_any_length = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 90)), min_size=1, max_size=30)
"""(seconds since the line before, length of the text); 0 is a line without a time."""


@given(
    logs=st.dictionaries(st.sampled_from(WRITERS), lines_of_any_length, max_size=3),
    num_unfinished=st.integers(0, 60),
    segment_bytes=st.integers(30, 300),
    since=st.one_of(st.none(), st.integers(-1, 30)),
    grep=st.sampled_from(["", "1", "7"]),
    tail=st.integers(0, 40),
)
def test_of_any_log_the_newest_lines_are_those_of_the_whole_log(
    tmp_path_factory: pytest.TempPathFactory,
    logs: dict[str, list[tuple[int, int]]],
    num_unfinished: int,
    segment_bytes: int,
    since: int | None,
    grep: str,
    tail: int,
) -> None:
    """Segments begin and end within lines, the last of which may be unfinished; lines are split where they are long."""
    storage = tmp_path_factory.getbasetemp() / secrets.token_hex(8)
    for writer, lines in logs.items():
        seconds, text = 0, ""
        for number, (pause, length) in enumerate(lines):
            seconds += pause
            text += (f"{time_at(seconds)} info " if pause or not number else "") + f"{number} {'x' * length}\n"
        text = text[: len(text) - num_unfinished]
        for number, begin in enumerate(range(0, len(text), segment_bytes)):
            write_log(storage, writer, number, text[begin : begin + segment_bytes])
    folder = SegmentFolder(Folder(str(storage)), "logs")
    since_us = 0 if since is None else to_us(BEGAN + timedelta(seconds=since))
    with small_blocks():
        of_all, of_end = (
            LogReader(folder, LogChoice(since=since_us)),
            LogReader(folder, LogChoice(since=since_us, grep=grep)),
        )
        every_line = sorted(
            (line for line in chain.from_iterable(of_all.lines()) if grep in line.text),
            key=attrgetter("time", "writer"),
        )
        newest = every_line[len(every_line) - min(tail, len(every_line)) :]
        assert list(chain.from_iterable(of_end.newest(tail))) == newest
        assert list(chain.from_iterable(of_end.lines())) == []
        assert of_end.unterminated_lines() == [line for line in of_all.unterminated_lines() if grep in line.text]


def test_of_a_long_log_only_its_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(400):
        write_log(tmp_path, "a1.driver", number, f"{time_at(number)} info line {number}\n")
    read_paths: set[str] = set()
    num_bytes_read: list[int] = []

    def read_and_count(self: SegmentFolder, segment: Segment, start: int, end: int) -> bytes:
        read_paths.add(segment.path)
        data = plain(self, segment, start, end)
        num_bytes_read.append(len(data))
        return data

    plain = SegmentFolder.read
    monkeypatch.setattr(SegmentFolder, "read", read_and_count)
    reader = LogReader(SegmentFolder(Folder(str(tmp_path)), "logs"))
    with small_blocks():
        assert [line[2][-3:] for line in read(reader.newest(5))] == ["395", "396", "397", "398", "399"]
    assert len(read_paths) <= 25
    read_paths.clear()
    choice = LogChoice(since=to_us(BEGAN + timedelta(seconds=390)))
    assert len(read(LogReader(SegmentFolder(Folder(str(tmp_path)), "logs"), choice).lines())) == 10
    assert len(read_paths) <= 25  # ten and one, and those searched for the place to begin
    for writer in ("driver", "g0.rank-0"):
        write_log(tmp_path, f"a2.{writer}", 0, "".join(f"{time_at(1000)} info {line}\n" for line in range(100_000)))
    num_bytes_read.clear()
    assert [line[2][-5:] for line in read(reader.newest(3))] == ["99997", "99998", "99999"]
    assert sum(num_bytes_read) < 1_000_000


def lines_of(plane: ControlPlane, job: dict[str, Any], **query: str) -> list[str]:
    answer = plane.http.get(f"/v1/jobs/{job['id']}/logs", params={"worker": "driver", **query})
    assert answer.status_code == 200, answer.text
    return answer.text.splitlines()


def test_what_is_searched_for_is_found_as_it_stands(plane: ControlPlane) -> None:
    job = plane.finished_job()
    write_log(Path(job["storage"]), "a1.driver", 0, "loss 5.0\nloss 510\n(a+)+$\n100%\n")
    for grep, lines in (("5.0", ["loss 5.0"]), ("(a+)+$", ["(a+)+$"]), ("100%", ["100%"]), ("LOSS", [])):
        assert lines_of(plane, job, grep=grep) == lines


def test_the_newest_and_then_what_comes(plane: ControlPlane) -> None:
    run = Run(plane)
    for number in range(10):
        write_log(run.storage, "a1.g0.rank-0", number, f"{time_at(number)} info step {number}\n")
    write_log(run.storage, "a1.driver", 0, f"{time_at(8.5)} info step between\n")
    query = {"follow": True, "tail": 3, "grep": "step"}
    with plane.http.stream("GET", f"/v1/jobs/{run.id}/logs", params=query) as answer:
        lines = answer.iter_lines()
        assert [next(lines).split("step ")[1] for _ in range(3)] == ["8", "between", "9"]
        write_log(run.storage, "a1.driver", 1, f"{time_at(20)} info other\n{time_at(21)} info step 21\n")
        assert next(lines).endswith("step 21")
        plane.http.post(f"/v1/jobs/{run.id}/cancel")
        assert list(lines) == []


def test_since_when(plane: ControlPlane) -> None:
    job, moment = plane.finished_job(), datetime.now(UTC)
    text = "".join(f"{rfc3339(moment - timedelta(seconds=age))} info {age}\n" for age in (7200, 1800, 60))
    write_log(Path(job["storage"]), "a1.driver", 0, text)
    for since, ages in (
        ("10m", ["60"]), ("1h", ["1800", "60"]), ("59m60s", ["1800", "60"]), ("3d", ["7200", "1800", "60"]),
        (rfc3339(moment - timedelta(seconds=1800)), ["1800", "60"]),
    ):  # fmt: skip
        assert [line.split()[-1] for line in lines_of(plane, job, since=since)] == ages
    for wrong in ("yesterday", "10", "-5m", "2026-01-31T12:00:00", "9" * 30 + "d"):
        answer = plane.http.get(f"/v1/jobs/{job['id']}/logs", params={"since": wrong})
        assert (answer.status_code, [error["path"] for error in answer.json()["errors"]]) == (422, ["query.since"])


@given(st.text(max_size=40))
def test_any_other_text_is_no_time(text: str) -> None:
    with suppress(ValueError):
        assert isinstance(parse_since(text), timedelta | datetime)


def test_what_is_asked_after_a_connection_broke() -> None:
    assert LogQuery(since="1h30m", grep="x").reconnect_query(9.6, time_at(0))["since"] == "5411s"
    assert LogQuery(since=time_at(0)).reconnect_query(10, time_at(5))["since"] == time_at(0)
    query = LogQuery(tail=10, since="1h").reconnect_query(10, time_at(5))
    assert (query.get("tail"), query["since"]) == (None, time_at(5))
    assert LogQuery(tail=10, since="1h").reconnect_query(10, None)["tail"] == 10


ODD = {
    "\x1b[31mred\x1b[0m": "red",
    "\x1b]0;title\x07text": "text",
    "\x1b]8;;http://a/\x1b\\link\x1b]8;;\x1b\\": "link",
    "\x1b[2J\x1b[1;1Hforged": "forged",
    "a\rb\r": "a b",
    "cut \x1b[3": "cut 3",
    "\u202etxet\u202c": "txet",
    "\x9b31mred\x07\x00": "red",
    "plain\ttext é☃": "plain\ttext é☃",
}


def test_what_steers_a_terminal_leaves_as_text_unless_it_is_asked_for(tmp_path: Path) -> None:
    write_log(tmp_path, "a1.driver", 0, "".join(f"{time_at(0)} info {raw_text}\n" for raw_text in ODD))
    folder = SegmentFolder(Folder(str(tmp_path)), "logs")
    plain, raw = (read(LogReader(folder, LogChoice(raw=raw)).lines()) for raw in (False, True))
    assert [line[2] for line in plain] == [f"{time_at(0)} info {text}" for text in ODD.values()]
    assert [line[2] for line in raw] == [f"{time_at(0)} info {raw_text}" for raw_text in ODD]
    assert [line[:2] for line in plain] == [line[:2] for line in raw]
    assert read(LogReader(folder, LogChoice(grep="\x1b")).lines()) == []


def test_the_api_and_the_command_give_raw_lines_to_whoever_asks(plane: ControlPlane) -> None:
    job = plane.finished_job()
    write_log(Path(job["storage"]), "a1.driver", 0, f"{time_at(0)} out \x1b[31mred\x1b[0m\n")
    assert lines_of(plane, job) == [f"{time_at(0)} out red"]
    assert lines_of(plane, job, raw="true") == [f"{time_at(0)} out \x1b[31mred\x1b[0m"]
    command = ("logs", job["id"], "--worker", "driver")
    assert "\x1b" not in shardyard(*command, url=plane.url).stdout
    assert "\x1b[31mred" in shardyard(*command, "--raw", url=plane.url).stdout
