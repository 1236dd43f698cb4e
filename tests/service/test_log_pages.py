"""Pages of a log from its end backwards: together they are the log, and each reads a bounded part of it."""

import secrets
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.storage.folder import Folder
from service.control.report import log_pages
from service.control.report.log_pages import LogPager, read_before, write_before
from service.control.report.logs import LEVELS, LogChoice, plain_text
from service.wire.segments import SegmentFolder
from tests.service.control_plane import ControlPlane
from tests.service.databases import BOTH_DATABASES
from tests.service.silent_run import Run
from tests.service.test_log_choice import WRITERS, segments, time_at, words, write_logs
from tests.service.test_streams import write_log


def pages_of(storage: Path, choice: LogChoice, limit: int) -> list[list[tuple[int, str, str]]]:
    """All pages, from the end backwards, each of lines in their order."""
    folder, before, pages = SegmentFolder(Folder(str(storage)), "logs"), None, []
    for _ in range(1000):
        page = LogPager(folder, choice).page(limit, before)
        pages.append([(line.time, line.writer.name, line.text) for line in reversed(page.lines)])
        if page.next_before is None:
            return pages
        before = read_before(write_before(page.next_before))
    raise AssertionError("the pages do not end")


@given(
    logs=st.dictionaries(st.sampled_from(WRITERS), segments, max_size=4),
    grep=words,
    limit=st.integers(1, 7),
    block_bytes=st.sampled_from([7, 40, 8000]),
    page_bytes=st.sampled_from([1, 500, 1 << 20]),
    page_s=st.sampled_from([0.0, 1e9]),
)
@settings(max_examples=30)
def test_all_pages_together_are_the_log(
    tmp_path_factory: pytest.TempPathFactory,
    logs: dict[str, list[list[tuple[int, str]]]],
    grep: str,
    limit: int,
    block_bytes: int,
    page_bytes: int,
    page_s: float,
) -> None:
    storage = tmp_path_factory.getbasetemp() / secrets.token_hex(8)
    selection = [line for line in write_logs(storage, logs) if grep in line[2]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_pages, "_BLOCK_BYTES", (block_bytes, 2 * block_bytes))
        patch.setattr(log_pages, "PAGE_BYTES", page_bytes)
        patch.setattr(log_pages, "PAGE_S", page_s)
        pages = pages_of(storage, LogChoice(grep=grep), limit)
    assert max(map(len, pages)) <= limit
    assert [line for page in reversed(pages) for line in page] == sorted(selection, key=lambda line: line[0])


def test_lines_longer_than_a_block_and_an_unfinished_last_one(tmp_path: Path) -> None:
    long = "x" * 100_000
    write_log(tmp_path, "a1.driver", 0, f"{time_at(0)} info {long}\n{time_at(1)} info next\n{time_at(2)} info half")
    (page,) = pages_of(tmp_path, LogChoice(), 10)
    assert [text.removeprefix(time_at(0)) for _, _, text in page][-2:] == [
        f"{time_at(1)} info next", f"{time_at(2)} info half",
    ]  # fmt: skip
    assert "".join(text for _, _, text in page[:-2]).removeprefix(f"{time_at(0)} info ") == long


def test_lines_of_a_level_or_a_more_severe_one(tmp_path: Path) -> None:
    levels = ["debug", "info", "out", "err", "warning", "error", "critical", "strange"]
    lines = [f"{time_at(number)} {level:<7} text of level\n" for number, level in enumerate(levels)]
    write_log(tmp_path, "a1.driver", 0, "".join(lines))
    for level, expected in (("debug", levels), ("info", levels[1:]), ("warning", levels[4:7]), ("error", levels[5:7])):
        (page,) = pages_of(tmp_path, LogChoice(severity=LEVELS[level]), 10)
        assert [text.split()[1] for _, _, text in page] == expected


def lines_page(plane: ControlPlane, job_id: str, **query: Any) -> dict[str, Any]:
    answer = plane.http.get(f"/v1/jobs/{job_id}/logs/lines", params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@BOTH_DATABASES
def test_a_page_over_http_is_clean_of_escape_codes_and_names_levels_and_writers(run: Run) -> None:
    write_log(run.storage, "a1.driver", 0, f"{time_at(0)} info    \x1b[31mred\x1b[0m\x1b]0;title\x07\n")
    write_log(run.storage, "a1.g0.rank-0", 0, f"{time_at(1)} error   <script>alert(1)</script>\n")
    page = lines_page(run.plane, run.id)
    assert [(line["worker"], line["level"], line["message"].split(maxsplit=2)[2]) for line in page["items"]] == [
        ("g0.rank-0", "error", "<script>alert(1)</script>"), ("driver", "info", "red"),
    ]  # fmt: skip
    assert page["writers"] == ["a1.driver", "a1.g0.rank-0"]
    newest = lines_page(run.plane, run.id, limit=1)
    assert lines_page(run.plane, run.id, cursor=newest["next_cursor"])["items"] == page["items"][1:]
    assert lines_page(run.plane, run.id, level="error")["items"] == page["items"][:1]
    answer = run.plane.http.get(f"/v1/jobs/{run.id}/logs/lines", params={"cursor": "nonsense"})
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "query.cursor")


def test_a_page_reads_a_bounded_part_of_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pages, "PAGE_BYTES", 100_000)
    for number in range(20):
        write_log(tmp_path, "a1.driver", number, f"{time_at(number)} info needle{number}.\n" + "hay\n" * 10_000)
    pages = pages_of(tmp_path, LogChoice(grep="needle3."), 10)
    assert [text.split()[-1] for page in pages for _, _, text in page] == ["needle3."]
    assert len(pages) >= 5


def test_blocks_without_a_level_are_skipped_unparsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pages, "_BLOCK_BYTES", (1000,))
    parsed: list[str] = []
    monkeypatch.setattr(log_pages, "plain_text", lambda text: parsed.append(text) or plain_text(text))
    for segment in range(4):
        lines = [f"{time_at(100 * segment + n)} info    Z is no error of {n}\n  Traceback\n" for n in range(100)]
        lines[17] = lines[17].replace("info ", "error")
        write_log(tmp_path, "a1.driver", segment, "".join(lines)[: -(segment % 2) or None])
    pages = pages_of(tmp_path, LogChoice(severity=LEVELS["error"]), 3)
    times = [time_at(100 * segment + 17) for segment in range(4)]
    assert [text[: len(times[0])] for page in reversed(pages) for _, _, text in page] == times
    assert len(parsed) < 300  # of 800
