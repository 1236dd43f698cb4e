"""Listings: what gives way where a terminal is narrow, and what never does."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from service.cli.view.listing import GAP, NEVER_LEFT_OUT, Column, fit_columns
from tests.service_cli.command import COMMAND, environment
from tests.service_cli.contract_server import JOB_ID, Script, serving
from tests.service_cli.terminal import on_a_terminal, plain

TOTAL = 2_004
REASON = "needs 64 GPUs of 漢字 nodes, and the cluster has 8: " + "add nodes or ask for fewer " * 6


def job(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"job-{number:012}", "name": f"translate-100-to-english-{number}", "state": "queued", "step": 1_200,
        "num_steps": 40_000, "reason": REASON, "created_at": "2026-01-31T12:00:05.000000Z", **more,
    }  # fmt: skip


def a_page_of_jobs(num_jobs: int = 20) -> Script:
    script = Script()
    jobs = [job(number) for number in range(num_jobs)]
    script.answer("GET", "/v1/jobs", 200, {"items": jobs, "next_cursor": "bjE", "total": TOTAL})
    return script


def ids(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.startswith("job-")]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_ids_are_whole_at_any_width(columns: int) -> None:
    with serving(a_page_of_jobs()) as url:
        status, written = on_a_terminal(columns, "ls", url=url)
    lines = plain(written)
    assert status == 0
    assert ids(lines) == [f"job-{number:012}" for number in range(20)]
    assert max(map(cell_len, lines[:-1])) <= columns
    assert lines[-1] == "showing 20 of 2,004; --limit N shows more"
    labels = lines[0].split()
    expected = {
        40: ["JOB", "STATE", "STEP"],
        80: ["JOB", "NAME", "STATE", "STEP", "REASON"],
        200: ["JOB", "NAME", "STATE", "STEP", "SUBMITTED", "REASON"],
    }
    assert labels == expected[columns], "columns give way in an order"


def test_a_pipe_gets_whole_lines() -> None:
    with serving(a_page_of_jobs()) as url:
        done = subprocess.run(
            [*COMMAND, "ls"], env=environment(url, FORCE_COLOR="1"), capture_output=True, text=True, check=False
        )
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in done.stdout.splitlines()]
    assert len(lines) == 21, "a line of labels, and one for each job"
    assert ids(lines) == [f"job-{number:012}" for number in range(20)]
    assert all(line.endswith(REASON.rstrip()) for line in lines[1:])
    assert done.stderr == "showing 20 of 2,004; --limit N shows more\n"


def test_nothing_is_said_where_all_are_shown() -> None:
    script = Script()
    script.answer("GET", "/v1/jobs", 200, {"items": [job(1)], "next_cursor": None})
    with serving(script) as url:
        _, written = on_a_terminal(80, "ls", url=url)
    assert "showing" not in written


@pytest.mark.parametrize("more", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_can_be_off(more: dict[str, str]) -> None:
    with serving(a_page_of_jobs()) as url:
        _, written = on_a_terminal(80, "ls", url=url, **more)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", written), "no colour"
    assert ("\x1b" in written) == ("TERM" not in more)


def test_a_size_in_the_environment_is_not_the_terminals() -> None:
    """As a shell that exports COLUMNS leaves it, when its window has been made narrower since."""
    with serving(a_page_of_jobs()) as url:
        _, written = on_a_terminal(80, "ls", url=url, COLUMNS="200", LINES="70")
    assert max(map(cell_len, plain(written))) <= 80


@pytest.mark.parametrize("columns", [40, 80, None])
def test_steps_are_shown_with_whole_figures(columns: int | None) -> None:
    script = Script(job={"name": "x", "state": "running", "step": 2, "num_steps": 4})
    points = [
        {"step": step, "time": "2026-01-31T12:00:05.000000Z", "attempt": 1, "loss": 3.14159, "nll": 2.71828,
         "lr": 0.0025, "grad_norm": 1.61803, "tokens": 1_048_576, "step_s": 0.577216, "tokens_per_s": 1_816_609.0}
        for step in (1, 2)
    ]  # fmt: skip
    script.answer("GET", f"/v1/jobs/{JOB_ID}/metrics", 200, {"items": points, "next_cursor": None})
    with serving(script) as url:
        if columns is None:
            done = subprocess.run(
                [*COMMAND, "metrics", JOB_ID], env=environment(url), capture_output=True, text=True, check=False
            )
            lines = done.stdout.splitlines()
        else:
            lines = plain(on_a_terminal(columns, "metrics", JOB_ID, url=url)[1])
    assert lines[0].split()[0] == "STEP"
    assert all("3.14159" in line for line in lines[1:3])
    assert "…" not in "\n".join(lines)
    if columns is None:
        assert lines[1].split()[-1] == "1.81661e+06"
        assert len(lines) == 3
    else:
        assert max(map(cell_len, lines[:3])) <= columns
        assert "TIME" not in lines[0]
        assert " ".join(lines[3:]).startswith("left out TIME, ATTEMPT")


def columns_of(drawn: list[tuple[str, int, int | None]]) -> list[Column]:
    return [
        Column(f"C{place}", [Text(text)], gives_way=gives_way, min_width=least)
        for place, (text, gives_way, least) in enumerate(drawn)
    ]


@given(
    st.lists(
        st.tuples(st.text("aé漢字", max_size=30), st.integers(0, 5), st.none() | st.integers(1, 12)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 120),
)
def test_what_is_fitted_has_room(drawn: list[tuple[str, int, int | None]], room: int) -> None:
    columns = columns_of(drawn)
    widths = fit_columns(columns, room)
    for column in columns:
        if column.gives_way == NEVER_LEFT_OUT:
            assert column.label in widths
        if column.label in widths:
            assert column.least <= widths[column.label] <= column.width
    total = sum(widths.values()) + GAP * (len(widths) - 1)
    if any(column.gives_way for column in columns if column.label in widths):
        assert total <= room
    left = [column.gives_way for column in columns if column.label not in widths]
    shown = [column.gives_way for column in columns if column.label in widths]
    assert not left or not shown or min(left) >= max(shown)


HEAVY = (
    "torch", "ray", "fastapi", "sqlalchemy", "fsspec", "yaml", "moe.spec", "moe.plan", "moe.train", "moe.data",
    "moe.storage", "service.control", "service.settings", "pydantic_settings", "numpy", "moe.records",
    "click", "pygments", "service.cli.view.language", "service.cli.view.translation", "service.wire.events",
)  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [["ls"], ["show", JOB_ID], ["cancel", JOB_ID], ["logs", JOB_ID], ["checkpoints", JOB_ID]]
)
def test_what_asks_and_prints_imports_no_more_than_that(arguments: list[str], tmp_path: Path) -> None:
    """Time is what users notice; modules are what can be asserted."""
    script = a_page_of_jobs()
    script.job = job(1, id=JOB_ID, storage="/s", last_metric={"step": 3, "loss": 2.5})
    script.logs = [([{"attempt": 1, "worker": "driver", "message": "m", "position": [0, 0, 1]}], True)]
    script.answer("POST", f"/v1/jobs/{JOB_ID}/cancel", 202, {})
    script.answer("GET", f"/v1/jobs/{JOB_ID}/checkpoints", 200, {"items": [], "next_cursor": None})
    code = (
        f"import sys; sys.argv = {['shardyard', *arguments]!r}\n"
        "from service.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        f"print({HEAVY!r} and [name for name in {HEAVY!r} if sys.modules.get(name)], file=sys.stderr)"
    )
    with serving(script) as url:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(url), capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "[]"), done.stderr
