"""Rows of the grid are recorded with their commits, run again in a fixed order, and shown on pages."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.__main__ import PAGES, ROOT
from tests.parity.combinations import LAYOUTS, OPTIONS, ROUTERS
from tests.parity.commits import commits_to, current_commit
from tests.parity.grid import FAMILY_ROWS, NAMES, ROUTER_ROWS, num_trainings_of
from tests.parity.records import Record, add_record, read_records, write_records
from tests.parity.row import Row
from tests.parity.table import page_of_families, page_of_routers
from tests.parity.wanted import wanted_rows

EXPECTED = {name: {"without": 15, "all": 15} for name in "abcdef"}


def record(commit: str = "new", num_same: int = 15, columns: tuple[str, ...] = ("without", "all")) -> Record:
    row = Row("a", 2, dict.fromkeys(columns, num_same), dict.fromkeys(columns, 15), {"training": {"losses": "1"}})
    return Record.of_row(row, commit, 1.234)


def test_a_record_replaces_only_its_own_row(tmp_path: Path) -> None:
    path = tmp_path / "records" / "routers.json"
    assert read_records(path) == {}
    assert add_record(path, "a", record()) == {"a": record()}
    add_record(path, "b", record("old"))
    assert add_record(path, "a", record("newer")) == read_records(path) == {"a": record("newer"), "b": record("old")}
    assert record().minutes == 1.23
    assert "losses" not in path.read_text()
    assert len(path.read_text().splitlines()) == 4, "a row a line, so that versions of the file merge"
    write_records(path, {})
    assert read_records(path) == {}


def test_rows_are_run_in_the_order_of_their_need() -> None:
    commits = ["new", "middle", "old"]
    records = {
        "a": record("middle"), "b": record("new"), "c": record("old"), "d": record("new", num_same=14),
        "e": record("new", columns=("without",)),
    }  # fmt: skip
    assert wanted_rows(EXPECTED, records, commits) == ["f", "e", "d", "c", "a"]
    assert wanted_rows(EXPECTED, records, commits, only_missing=True) == ["f", "e", "d"]
    unknown = {**records, "a": record("of another repository")}
    assert wanted_rows(EXPECTED, unknown, commits)[3:] == ["a", "c"]
    assert wanted_rows(EXPECTED, dict.fromkeys(EXPECTED, record()), commits) == []


def test_a_commit_is_named_dirty_if_other_files_than_the_records_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        return subprocess.check_output(["git", *identity, *arguments], cwd=tmp_path, text=True).strip()

    git("init", "-q")
    for name in ("code.py", "records.json"):
        (tmp_path / name).write_text("1\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "records.json").write_text("2\n")
    assert current_commit(tmp_path, ["records.json"]) == commit
    (tmp_path / "code.py").write_text("2\n")
    assert current_commit(tmp_path, ["records.json"]) == f"{commit}-dirty"
    git("commit", "-q", "-a", "-m", "second")
    assert commits_to(tmp_path) == [git("rev-parse", "HEAD"), commit]


def test_pages_show_what_was_run_and_at_which_commit() -> None:
    name = ROUTER_ROWS[1]
    same = num_trainings_of(name)
    full = Record("1234567890", "2.13.0", "x86_64", 30.0, 2, same, same)
    line = _line_of(page_of_routers({name: full}), "expert: expert=2")
    assert line.count(f"{len(ROUTERS)} same") == len(OPTIONS)
    assert line.endswith("| 12345678 |")
    one_less = {**same, "without": len(ROUTERS) - 2}
    line = _line_of(page_of_routers({name: replace(full, num_same=one_less)}), "expert: expert=2")
    assert f"| 2 | {len(ROUTERS) - 2} of {len(ROUTERS)} same: **differs** |" in line
    old = dict.fromkeys(OPTIONS[:-1], 13)
    line = _line_of(page_of_routers({name: replace(full, num_same=old, num_trainings=old)}), "expert: expert=2")
    assert line.endswith("| 13 same | not run | 12345678 |")
    data_name = next(name for name in ROUTER_ROWS if name.endswith("data: data=2"))
    some = num_trainings_of(data_name)
    line = _line_of(page_of_routers({data_name: replace(full, num_same=some, num_trainings=some)}), "data: data=2")
    assert line.count("| – ") == 2, "options without effect"
    family = FAMILY_ROWS[0]
    assert num_trainings_of(family) == {kind: len(layouts) for kind, layouts in LAYOUTS.items()}
    line = _line_of(page_of_families({family: full}), family.removeprefix("families, "))
    assert line.count("not run") == len(LAYOUTS)


def _line_of(text: str, title: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {title} |"))
    return line


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_are_those_of_the_records(page: str) -> None:
    """And a row that differs from one process is not recorded as the last word."""
    records = read_records(ROOT / PAGES[page].records_path)
    assert records
    assert set(records) <= set(NAMES), "rows of layouts that are no longer in the grid"
    assert not [name for name, record in records.items() if record.differs]
    assert (ROOT / PAGES[page].path).read_text() == PAGES[page].text_of(records)
