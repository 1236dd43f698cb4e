"""Listings, plans and the live display on terminals of any width: what gives way, and what never does."""

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

from service.cli.view.listing import ALWAYS_SHOWN, GAP, Column, fit_columns
from tests.service_cli.command import COMMAND, environment, output_of
from tests.service_cli.contract_server import JOB_ID, Handler, Script, as_sse, event, serving
from tests.service_cli.terminal import ESCAPE, on_a_terminal, plain

TOTAL = 2_004
REASON = "needs 64 GPUs of 漢字 nodes, and the cluster has 8: " + "add nodes or ask for fewer " * 6


def job(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"job-{number:012}", "name": f"translate-100-to-english-{number}", "state": "queued", "step": 1_200,
        "num_steps": 40_000, "reason": REASON, "created_at": "2026-01-31T12:00:05.000000Z", **fields,
    }  # fmt: skip


def a_page_of_jobs(num_jobs: int = 20) -> Script:
    script = Script()
    jobs = [job(number) for number in range(num_jobs)]
    script.answer("GET", "/v1/jobs", 200, {"items": jobs, "next_cursor": "bjE", "total": TOTAL})
    return script


def ids(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.startswith("job-")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_ids_are_whole_at_any_width(columns: int) -> None:
    with serving(a_page_of_jobs()) as url:
        status, output = on_a_terminal(columns, "ls", url=url)
    lines = plain(output)
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


def run_in_pipe(*arguments: str, url: str, **overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=environment(url, **overrides), capture_output=True, text=True, check=False
    )


def test_a_pipe_gets_whole_lines() -> None:
    with serving(a_page_of_jobs()) as url:
        result = run_in_pipe("ls", url=url, FORCE_COLOR="1")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in result.stdout.splitlines()]
    assert len(lines) == 21, "a line of labels, and one for each job"
    assert ids(lines) == [f"job-{number:012}" for number in range(20)]
    assert all(line.endswith(REASON.rstrip()) for line in lines[1:])
    assert result.stderr == "showing 20 of 2,004; --limit N shows more\n"
    script = Script()
    script.answer("GET", "/v1/jobs", 200, {"items": [job(1)], "next_cursor": None})
    with serving(script) as url:
        result = run_in_pipe("ls", url=url)
    assert (result.returncode, result.stderr) == (0, ""), "where all are shown"


@pytest.mark.parametrize("overrides", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_can_be_off_and_a_size_in_the_environment_is_not_the_terminals(overrides: dict[str, str]) -> None:
    """As in a shell that exports COLUMNS, whose window was made narrower since."""
    with serving(a_page_of_jobs()) as url:
        _, output = on_a_terminal(80, "ls", url=url, COLUMNS="200", LINES="70", **overrides)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", output), "no colour"
    assert ("\x1b" in output) == ("TERM" not in overrides)
    assert max(map(cell_len, plain(output))) <= 80


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
            lines = run_in_pipe("metrics", JOB_ID, url=url).stdout.splitlines()
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


COLUMN_CONTENTS = st.tuples(st.text("aé漢字", max_size=30), st.integers(0, 5), st.none() | st.integers(1, 12))


@given(st.lists(COLUMN_CONTENTS, min_size=1, max_size=8), st.integers(1, 120))
def test_columns_that_are_fitted_have_room(contents: list[tuple[str, int, int | None]], room: int) -> None:
    columns = [
        Column(f"C{place}", [Text(text)], can_shrink=can_shrink, min_width=min_width)
        for place, (text, can_shrink, min_width) in enumerate(contents)
    ]
    widths = fit_columns(columns, room)
    for column in columns:
        if column.can_shrink == ALWAYS_SHOWN:
            assert column.label in widths
        if column.label in widths:
            assert column.least_width <= widths[column.label] <= column.width
    left = [column.can_shrink for column in columns if column.label not in widths]
    visible = [column.can_shrink for column in columns if column.label in widths]
    assert not any(visible) or sum(widths.values()) + GAP * (len(widths) - 1) <= room
    assert not left or not visible or min(left) >= max(visible)


HEAVY = (
    "torch", "ray", "fastapi", "sqlalchemy", "fsspec", "yaml", "moe.spec", "moe.plan", "moe.train", "moe.data",
    "moe.storage", "service.control", "service.settings", "pydantic_settings", "numpy", "moe.records",
    "click", "pygments", "service.cli.view.language", "service.cli.view.translation", "service.wire.events",
)  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", ["ls", "show", "cancel", "logs", "checkpoints"])
def test_a_command_that_asks_and_prints_imports_no_more_than_that(command: str) -> None:
    """Time is what users notice; modules are what can be asserted."""
    arguments = [command] if command == "ls" else [command, JOB_ID]
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
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment(url), capture_output=True, text=True, check=False
        )
    assert (result.returncode, result.stderr.splitlines()[-1]) == (0, "[]"), result.stderr


EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_STEPS = 30


def run_of(num_layers: int, num_experts: int) -> Script:
    """A run of 30 steps with warnings, a restart, checkpoints, wide characters and an expert that is never used."""
    events: list[dict] = [
        event(0, "state", None, state="queued", previous="queued", reason="waits for 漢字 " + "room " * 30),
        event(0, "state", state="running", previous="starting", reason="worker group 0 runs on 2 workers"),
        event(0, "log", level="info", message="reads the corpus العربية"),
    ]
    for step in range(1, NUM_STEPS + 1):
        layers = [
            {"layer": 2 * layer + 1, "load": [0, *range(1, num_experts)], "rejected": 0.1, "dropped": 0.031}
            for layer in range(num_layers)
        ]
        figures = {"loss": 5.5 - step / 10, "nll": 5.1, "lr": 2.5e-3, "tokens_per_s": 11_640.0}
        events.append(event(0, "metric", step=step, layers=layers, **figures))
    events += [
        event(0, "checkpoint", step=NUM_STEPS),
        event(0, "log", level="warning", message="\x1b[31mbeware\x1b[0m"),
        event(0, "state", state="succeeded", previous="running", reason=f"finished at step {NUM_STEPS}"),
    ]
    script = Script(job={"name": "translate-100-to-english", "state": "running", "step": 0, "num_steps": NUM_STEPS})
    script.events = [
        event(id, fields["kind"], fields["attempt"], **fields["data"]) for id, fields in enumerate(events, start=1)
    ]

    def play(handler: Handler, backlog: list[dict]) -> None:
        for entry in backlog:
            handler.send_chunk(as_sse(entry))
        script.job |= {"state": "succeeded", "step": NUM_STEPS, "reason": f"finished at step {NUM_STEPS}"}
        handler.end_chunks()

    script.plays = [play]
    return script


@pytest.mark.sample(2)
@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize(("num_layers", "num_experts"), [(2, 8), (60, 8), (2, 512)])
def test_the_display_fits_the_terminal(columns: int, num_layers: int, num_experts: int) -> None:
    with serving(run_of(num_layers, num_experts)) as url:
        status, output = on_a_terminal(columns, "watch", JOB_ID, url=url)
    assert status == 0
    lines = [ESCAPE.sub("", line) for line in re.split(r"\r\n|\n|\r", output)]
    frames = output.split("\x1b[2K")
    assert len(frames) > 1, "it is redrawn in place"
    assert max(map(cell_len, lines)) <= columns
    final = "\n".join(lines)
    for expected in (
        f"step {NUM_STEPS} / {NUM_STEPS}  100%", "loss 2.500", "tokens/s 11,640", "lr 2.5e-3", "checkpoint 30",
        "layer 1", "1 unused", "3% dropped", "█", "warning    [31mbeware [0m",
        f"{JOB_ID} succeeded: finished at step 30",
    ):  # fmt: skip
        assert expected in final, expected
    assert ("more MoE layers" in final) == (num_layers == 60)


def test_no_terminal_gets_plain_lines() -> None:
    with serving(run_of(2, 8)) as url:
        plain_output = output_of("watch", JOB_ID, url=url)
        status, output = on_a_terminal(80, "watch", JOB_ID, url=url, PYTHONIOENCODING="ascii:replace", LC_ALL="C")
    assert "\x1b" not in plain_output
    assert "step 30/30  loss 2.500  nll 5.100  tokens/s 11,640  lr 2.5e-3" in plain_output
    assert plain_output.count("step ") < NUM_STEPS, "a line every few seconds, not one a step"
    assert (status, "\x1b[2K" in output) == (0, False), "a terminal that cannot draw gets them, too"


PLAN_FILE = EXAMPLES / "deepseek-v3-1024-h100.yaml"
WHOLE = ("tokens/s", "split: fsdp 1024", "expert_fsdp 64", "next best", "rejected", "of 80.00 GiB")


def plan_lines(columns: int, *options: str) -> list[str]:
    """The lines of a plan on a terminal of that width."""
    status, output = on_a_terminal(columns, "plan", str(PLAN_FILE), *options, url="http://127.0.0.1:1")
    assert status == 0, output
    return [line.rstrip() for line in ESCAPE.sub("", output).replace("\r", "").splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 140])
def test_a_plan_fits_the_terminal(columns: int) -> None:
    """Columns are aligned, sentences wrap, and no word is cut."""
    lines = plan_lines(columns, "--full")
    assert max(map(cell_len, lines)) <= columns
    text = "\n".join(lines)
    assert "…" not in text
    for words in WHOLE:
        assert words in text
    first = next(number for number, line in enumerate(lines) if line.startswith("block"))
    end = lines[first].index("layers") + len("layers")
    rows = [line for line in lines[first + 1 : lines.index("", first)] if line[end:].split()[1:2] != []]
    counts = [line[:end].split()[-1] for line in rows if line[end - 1 : end].isdigit()]
    assert counts == ["1", "3", "58", "58", "1"]
    assert "more rows are exchanged in more chunks" in " ".join(text.split())


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("columns", [80, 140])
def test_a_plan_in_short_is_a_verdict_and_a_table(columns: int) -> None:
    """The judgement comes first, within 45 lines, and no word is cut."""
    lines = plan_lines(columns)
    assert max(map(cell_len, lines)) <= columns
    assert "…" not in "".join(lines)
    assert [line.split()[0] for line in lines[:2]] == ["for", "fits"]
    assert len(lines) <= 45
    text = " ".join(" ".join(lines).split())
    for words in ("GiB free for the framework and its allocator", "can be run yes", "MFU", "layouts (predicted)"):
        assert words in text, text


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 140])
def test_a_grid_of_plans_fits_the_terminal(columns: int) -> None:
    lines = plan_lines(columns, "--what-if", "experts=256,512,nodes=128")
    assert max(map(cell_len, lines)) <= columns
    assert [line.split()[:2] for line in lines if line.split()[1:2] == ["128"]] == [
        ["256", "128"], ["512", "128"],
    ]  # fmt: skip
