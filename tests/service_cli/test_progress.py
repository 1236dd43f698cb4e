"""A run's progress, folded from its events; and its charts."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from service.cli.view.amounts import duration, num_bytes, rate
from service.cli.view.bars import UNUSED, experts_per_bar, load_bars
from service.cli.view.printable import printable
from service.cli.view.progress import LOAD_WINDOW_STEPS, RunProgress
from service.wire.events import Event

START = datetime(2026, 1, 31, 12, tzinfo=UTC)


def progress_after(*told: tuple[str, float, dict[str, Any]]) -> tuple[RunProgress, list[str]]:
    """Progress and notices after events of (kind, second, data)."""
    progress, notices = RunProgress("job-abcdefghijkl", "x", num_steps=100), []
    for id, (kind, second, data) in enumerate(told, start=1):
        time = START + timedelta(seconds=second)
        notice = progress.take(Event(id=id, kind=kind, time=time, attempt=1, actor="group-0", data=data))  # type: ignore[arg-type]
        if notice is not None:
            notices.append(f"{notice.kind} {notice.text}")
    return progress, notices


def metric(step: int, second: float, load: tuple[int, ...] = (1, 3)) -> tuple[str, float, dict[str, Any]]:
    layers = [{"layer": 1, "load": list(load), "rejected": 0.1, "dropped": 0.2}]
    return "metric", second, {"step": step, "loss": 1.0, "layers": layers}


def test_time_left_is_at_the_pace_of_the_latest_steps() -> None:
    progress, _ = progress_after(*(metric(step, second=100 + 0.5 * step) for step in range(1, 21)))
    assert progress.seconds_left == pytest.approx(40.0)
    assert progress_after(metric(1, 0))[0].seconds_left is None
    assert progress_after(metric(99, 0), metric(100, 1))[0].seconds_left is None


def test_redone_steps_start_the_pace_anew() -> None:
    told = [metric(step, second=step) for step in range(1, 11)]
    progress, _ = progress_after(*told, *(metric(step, second=100 + 2 * step) for step in range(6, 11)))
    assert progress.step == 10
    assert progress.seconds_left == pytest.approx(180.0)


def test_what_an_older_attempt_recorded_and_comes_late_moves_nothing() -> None:
    progress, _ = progress_after(*(metric(step, second=step) for step in range(1, 11)))
    before = replace(progress)
    for superseded in ("run", "step"):
        data = {"step": 3, "loss": 9.0}
        progress.take(
            Event(id=11, kind="metric", time=START, attempt=1, actor="group-0", data=data, superseded=superseded)
        )
    assert (progress.step, progress.metric, progress.seconds_left) == (10, before.metric, before.seconds_left)


def test_loads_are_added_over_the_latest_steps_only() -> None:
    told = [metric(step, step, load=(1000, 0)) for step in range(1, 6)]
    told += [metric(step, step, load=(1, 3)) for step in range(6, 6 + LOAD_WINDOW_STEPS)]
    (layer,) = progress_after(*told)[0].layers()
    assert layer.load == (LOAD_WINDOW_STEPS, 3 * LOAD_WINDOW_STEPS)
    assert layer.shares == (0.5, 1.5)
    assert (layer.dropped, layer.num_unused) == (pytest.approx(0.2), 0)


def test_what_stays_on_the_screen() -> None:
    progress, notices = progress_after(
        ("state", 0, {"state": "queued", "previous": "queued", "reason": "waiting for its turn"}),
        ("state", 1, {"state": "running", "previous": "starting", "reason": ""}),
        ("log", 2, {"level": "info", "message": "reads the corpus"}),
        ("log", 3, {"level": "warning", "message": "one\x1b[2Jtwo"}),
        metric(1, 4),
        ("checkpoint", 5, {"step": 1}),
    )
    assert notices == ["state queued: waiting for its turn", "state running", "warning one [2Jtwo"]
    assert (progress.state, progress.checkpoint_step, progress.last_event_id) == ("running", 1, 6)


def test_a_new_reason_is_no_new_state() -> None:
    progress, _ = progress_after(
        ("state", 0, {"state": "queued", "reason": "waiting for its turn"}),
        ("state", 60, {"state": "queued", "reason": "needs 2 CPUs of 1"}),
    )
    assert progress.state_since == START
    assert progress.reason == "needs 2 CPUs of 1"


@given(st.lists(st.floats(0, 50), min_size=1, max_size=300), st.integers(4, 140), st.integers(1, 6))
def test_bars_keep_to_their_room(shares: list[float], width: int, height: int) -> None:
    rows = load_bars(shares, width, height)
    assert len(rows) == height
    assert all(cell_len(row.plain) <= width for row in rows)
    num_bars = -(-len(shares) // experts_per_bar(len(shares), width))
    if num_bars == len(shares):
        assert any(mark in rows[-1].plain for mark in UNUSED) == (0.0 in shares)


def test_bars_are_as_tall_as_their_loads() -> None:
    top, bottom = (row.plain for row in load_bars([2.0, 1.0, 0.5, 0.0], width=8, height=2))
    assert (top, bottom) == ("█       ", "█ █ ▄ × ")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (duration(7.4), "0:07"), (duration(133), "2:13"), (duration(3765), "1:02:45"),
        (duration(90_000 * 3), "3 d 3 h"), (rate(2.5e-3), "2.5e-3"), (rate(0), "0.0e0"),
        (num_bytes(512), "512 B"), (num_bytes(40_960), "40 KiB"), (num_bytes(3.1 * 1024**2), "3.1 MiB"),
        (num_bytes(40 * 1024**2), "40 MiB"), (num_bytes(1024**3 / 4), "0.25 GiB"),
        (num_bytes(2048 * 1024**3), "2,048.00 GiB"),
    ],
)  # fmt: skip
def test_amounts(shown: str, expected: str) -> None:
    assert shown == expected


def test_text_from_elsewhere_cannot_move_the_cursor_or_turn_the_line() -> None:
    assert printable("a\x1b]0;title\x07b\r\nc\u202ed\u2028e") == "a ]0;title b  c d e"
    assert printable("العربية 漢字 हिन्दी") == "العربية 漢字 हिन्दी"
