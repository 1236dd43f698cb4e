"""The live display on an emulated terminal, and the progress that it is drawn from: what stays on it is whole."""

import io
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from moe.records import PreparationRecord
from service.cli.view.amounts import duration, num_bytes, rate
from service.cli.view.bars import UNUSED, experts_per_bar, load_bars
from service.cli.view.follow import LiveFollower
from service.cli.view.frame import frame
from service.cli.view.printable import printable
from service.cli.view.progress import LOAD_WINDOW_STEPS, RunProgress
from service.wire.events import Event
from tests.service_cli.command import shardyard
from tests.service_cli.contract_server import JOB_ID, Handler, Script, as_sse, serving

ROWS = 24
START = datetime(2026, 1, 31, 12, tzinfo=UTC)


class EmulatedTerminal(io.StringIO):
    """A terminal, as a program writes to it: rows that scroll off its top are kept."""

    def __init__(self, columns: int, rows: int = ROWS) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=0.5)
        self._stream = pyte.Stream(self.screen)

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    def isatty(self) -> bool:
        return True

    @property
    def rows(self) -> list[str]:
        """Every row from the first, those on the screen last."""
        history_rows = [_row(line, self.screen.columns) for line in self.screen.history.top]
        return [*history_rows, *(row.rstrip() for row in self.screen.display)]


def _row(line: Any, columns: int) -> str:
    return "".join(line[column].data for column in range(columns)).rstrip()


def console_on(terminal: EmulatedTerminal, columns: int) -> Console:
    return Console(
        file=terminal, force_terminal=True, width=columns, height=ROWS, highlight=False, emoji=False, markup=False,
        color_system="standard", _environ={"TERM": "xterm-256color"},
    )  # fmt: skip


def event(id: int, kind: str, **data: Any) -> Event:
    time = START + timedelta(seconds=id)
    return Event(id=id, kind=kind, time=time, attempt=1, actor="group-0", data=data)  # type: ignore[arg-type]


def reason(number: int) -> str:
    """Two rows at 80 columns, each of them marked."""
    return f"first-{number} " + "waits for workers that the cluster has no room for now " * 2 + f"second-{number}"


def states(num_states: int) -> Iterator[Event]:
    """States with long reasons, between which the frame grows and shrinks by a row."""
    id = 0
    for number in range(num_states):
        id += 1
        yield event(id, "state", state=("queued", "starting")[number % 2], reason=reason(number))
        if random.Random(number).random() < 0.7:
            id += 1
            yield event(id, "log", level="info", message=f"does {number}")


def follower_on(terminal: EmulatedTerminal, seconds_between_frames: float = 0.001) -> LiveFollower:
    columns = terminal.screen.columns
    progress = RunProgress("job-abcdefghijkl", "x", 100)
    return LiveFollower(progress, console_on(terminal, columns), seconds_between_frames)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80, 140])
def test_no_notice_loses_a_row(columns: int) -> None:
    terminal = EmulatedTerminal(columns)
    follower = follower_on(terminal, 5_000)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as on a slow terminal
    try:
        follower.show(states(300))
    finally:
        sys.setswitchinterval(interval)
    text = " ".join(" ".join(terminal.rows).split())
    for number in range(300):
        assert text.count(f" {reason(number)} ") == 1, number


def test_a_notice_and_the_frame_below_it_are_of_one_state() -> None:
    """After every write, the state that the frame shows is that of the last notice."""
    pairs: list[tuple[str, str]] = []

    class WatchedTerminal(EmulatedTerminal):
        def write(self, text: str) -> int:
            num_written = super().write(text)
            notices = [row.split()[2].rstrip(":") for row in self.rows if row[9:14] == "state"]
            frames = re.findall(r"job-abcdefghijkl +(\w+)", "\n".join(self.screen.display))
            pairs.extend((notices[-1], state) for state in frames if notices)
            return num_written

    follower_on(WatchedTerminal(80)).show(
        event(id, "state", state=("queued", "starting", "running")[id % 3], reason="r") for id in range(1, 60)
    )
    assert len(pairs) >= 59
    assert all(notice == state for notice, state in pairs)


def test_a_terminal_that_is_resized_shows_whole_rows_again() -> None:
    terminal = EmulatedTerminal(120)
    console = console_on(terminal, 120)
    follower = LiveFollower(RunProgress("job-abcdefghijkl", "x", 100), console, 0.001)

    def event_stream() -> Iterator[Event]:
        yield from (event(id, "state", state="queued", reason=f"reason-{id} " + "word " * 30) for id in (1, 2))
        yield event(3, "metric", step=1, loss=2.5)
        # As terminals that wrap rows anew: a row wider than the window goes on in the next.
        rows = [row.rstrip() for row in terminal.screen.display[: terminal.screen.cursor.y + 1]]
        console.width = 60
        terminal.screen.resize(ROWS, 60)
        terminal.screen.reset()
        parts = [row[first : first + 60] for row in rows for first in range(0, max(1, len(row)), 60)]
        terminal.write("\n".join(parts))
        yield event(4, "state", state="running", reason="after")

    follower.show(event_stream())
    rows = [row.rstrip() for row in terminal.screen.display]
    text = " ".join(" ".join(rows).split())
    assert max(map(cell_len, rows)) <= 60
    assert [text.count(f"reason-{id}") for id in (1, 2)] == [1, 1]
    assert sum("step 1 / 100" in row for row in rows) == 1, "one frame"
    assert sum("job-abcdefghijkl" in row for row in rows) == 1
    assert sum("━" in row for row in rows) == 1
    assert sum("running: after" in row for row in rows) == 1


def frame_rows(progress: RunProgress, columns: int) -> list[str]:
    """Rows of a frame, none of them wider than the terminal."""
    console = console_on(EmulatedTerminal(columns), columns)
    lines = console.render_lines(frame(progress, columns, ROWS), pad=False)
    rows = ["".join(segment.text for segment in line).rstrip() for line in lines]
    assert max(map(cell_len, rows)) <= columns
    return rows


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_frame_fits_and_its_id_and_state_are_whole(columns: int) -> None:
    progress = RunProgress("job-abcdefghijkl", "翻訳" * 20, 4_000)
    progress.take(event(1, "state", state="recovering", reason="x"))
    layers = [{"layer": 1, "load": [0, 1, 2, 3], "rejected": 0.1, "dropped": 0.3}]
    progress.take(event(2, "metric", step=1_000, loss=2.5, nll=2.4, tokens_per_s=123_456.0, lr=1e-3, layers=layers))
    progress.take(event(3, "checkpoint", step=1_000))
    rows = frame_rows(progress, columns)
    if columns >= 40:
        assert "job-abcdefghijkl  recovering" in rows[0]
        for figure in ("loss 2.500", "nll 2.400", "tokens/s 123,456", "lr 1.0e-3", "checkpoint 1,000"):
            assert any(figure in row for row in rows), figure


def test_checkpoints_are_a_figure_and_no_lines() -> None:
    """One every step would push everything else off the screen."""
    terminal = EmulatedTerminal(80)
    events = [event(1, "state", state="running", reason="r")]
    for step in range(1, 51):
        events += [event(2 * step, "metric", step=step, loss=2.5), event(2 * step + 1, "checkpoint", step=step)]
    follower_on(terminal).show(events)
    rows = [row for row in terminal.rows if row]
    assert len(rows) < 8
    assert sum("checkpoint 50" in row for row in rows) == 1


def preparation_event(id: int, stage: str, share: float | None, seconds: float, num_done: int = 0) -> Event:
    record = PreparationRecord(stage, share, num_done, seconds)
    return event(id, "log", level="info", message=record.in_words(), preparing=record.to_plain())


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_preparation_of_data_has_a_bar_and_an_estimate(columns: int) -> None:
    progress = RunProgress("job-abcdefghijkl", "x", 100)

    def row_after(event: Event) -> str:
        progress.take(event)
        return frame_rows(progress, columns)[1]

    row_after(event(1, "state", state="starting", reason=""))
    row = row_after(preparation_event(2, "encoding", 0.25, 10.0))
    if columns >= 80:
        assert row.endswith(" preparing data: encoding, 25%  0:30 left")
        assert "━" in row
    else:
        assert "preparing data: encoding" in row
    assert "preparing data: encoding, 12,000" in row_after(
        preparation_event(3, "encoding", None, 20.0, num_done=12_000)
    )
    end_event = event(4, "log", level="info", message="data took 31.2 s", record="phase")
    assert "step 0 / 100" in row_after(end_event)
    row_after(preparation_event(5, "encoding", 0.5, 20.0))
    assert "step 1 / 100" in row_after(event(6, "metric", step=1, loss=2.5))


@pytest.mark.parametrize(("last", "expected"), [("encoding", True), (None, False)])
def test_show_says_how_far_the_data_is_prepared(last: str | None, expected: bool) -> None:
    """Only while preparation is the job's latest event."""
    events = [preparation_event(1, "reading", 0.1, 5.0), preparation_event(2, "encoding", 0.75, 30.0)]
    if last is None:
        events.append(event(3, "log", level="info", message="data took 40 s", record="phase"))
    script = Script(events=[entry.model_dump(mode="json") for entry in events])
    script.job = {"name": "x", "state": "starting", "attempt": 1, "step": 0, "num_steps": 100, "storage": "/s"}
    script.plays = [all_then_silence]
    with serving(script) as url:
        result = shardyard("show", JOB_ID, url=url)
    assert result.returncode == 0, result.stderr
    assert ("preparing data: encoding, 75%  0:10 left" in result.stdout) == expected


def all_then_silence(handler: Handler, backlog: list[dict[str, Any]]) -> None:
    """As for a job that goes on: `show` does not wait for its end."""
    for entry in backlog:
        handler.send_chunk(as_sse(entry))
    handler.server.script.close_event.wait()
    handler.break_off()


def progress_after(*records: tuple[str, float, dict[str, Any]]) -> tuple[RunProgress, list[str]]:
    """Progress and notices after events of (kind, second, data)."""
    progress, notices = RunProgress("job-abcdefghijkl", "x", num_steps=100), []
    for id, (kind, second, data) in enumerate(records, start=1):
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
    # Redone steps start the pace anew.
    metrics = [metric(step, second=step) for step in range(1, 11)]
    progress, _ = progress_after(*metrics, *(metric(step, second=100 + 2 * step) for step in range(6, 11)))
    assert (progress.step, progress.seconds_left) == (10, pytest.approx(180.0))


def test_what_an_older_attempt_recorded_and_comes_late_moves_nothing() -> None:
    progress, _ = progress_after(*(metric(step, second=step) for step in range(1, 11)))
    before = replace(progress)
    for scope in ("run", "step"):
        data = {"step": 3, "loss": 9.0}
        progress.take(Event(id=11, kind="metric", time=START, attempt=1, actor="group-0", data=data, superseded=scope))
    assert (progress.step, progress.metric, progress.seconds_left) == (10, before.metric, before.seconds_left)


def test_loads_are_added_over_the_latest_steps_only() -> None:
    metrics = [metric(step, step, load=(1000, 0)) for step in range(1, 6)]
    metrics += [metric(step, step, load=(1, 3)) for step in range(6, 6 + LOAD_WINDOW_STEPS)]
    (layer,) = progress_after(*metrics)[0].layers()
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
        ("metric", 6, {"step": 2, "loss": 1.0, "samples": [{"prompt": "a\n", "completion": "b\x1b[2J\nc"}]}),
    )
    assert notices == [
        "state queued: waiting for its turn", "state running", "warning one [2Jtwo", "samples step 2\n  a ⟶ b [2J c",
    ]  # fmt: skip
    assert (progress.state, progress.checkpoint_step, progress.last_event_id) == ("running", 1, 7)


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


def test_amounts_and_text_from_elsewhere() -> None:
    for text, expected in (
        (duration(7.4), "0:07"), (duration(133), "2:13"), (duration(3765), "1:02:45"),
        (duration(90_000 * 3), "3 d 3 h"), (rate(2.5e-3), "2.5e-3"), (rate(0), "0.0e0"),
        (num_bytes(512), "512 B"), (num_bytes(40_960), "40 KiB"), (num_bytes(3.1 * 1024**2), "3.1 MiB"),
        (num_bytes(40 * 1024**2), "40 MiB"), (num_bytes(1024**3 / 4), "0.25 GiB"),
        (num_bytes(2048 * 1024**3), "2,048.00 GiB"),
        # Such text can neither move the cursor nor turn the line.
        (printable("a\x1b]0;title\x07b\r\nc\u202ed\u2028e"), "a ]0;title b  c d e"),
        (printable("العربية 漢字 हिन्दी"), "العربية 漢字 हिन्दी"),
    ):  # fmt: skip
        assert text == expected
