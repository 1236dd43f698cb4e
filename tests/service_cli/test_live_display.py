"""The live display on an emulated terminal: what stays on it is whole, whoever draws meanwhile."""

import io
import random
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyte
import pytest
from rich.cells import cell_len
from rich.console import Console

from moe.records import PreparationRecord
from service.cli.view.follow import LiveFollower
from service.cli.view.frame import frame
from service.cli.view.progress import RunProgress
from service.wire.events import Event
from tests.service_cli.command import shardyard
from tests.service_cli.contract_server import JOB_ID, Handler, Script, as_sse, serving

ROWS = 24
START = datetime(2026, 1, 31, 12, tzinfo=UTC)


class Emulated(io.StringIO):
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
        above = [_row(line, self.screen.columns) for line in self.screen.history.top]
        return [*above, *(row.rstrip() for row in self.screen.display)]


def _row(line: Any, columns: int) -> str:
    return "".join(line[column].data for column in range(columns)).rstrip()


def console_on(terminal: Emulated, columns: int) -> Console:
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("columns", [40, 80, 140])
def test_no_notice_loses_a_row(columns: int) -> None:
    terminal = Emulated(columns)
    follower = LiveFollower(RunProgress("job-abcdefghijkl", "x", 100), console_on(terminal, columns), 5_000)
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
    seen: list[tuple[str, str]] = []

    class Watched(Emulated):
        def write(self, text: str) -> int:
            done = super().write(text)
            notices = [row.split()[2].rstrip(":") for row in self.rows if row[9:14] == "state"]
            frames = re.findall(r"job-abcdefghijkl +(\w+)", "\n".join(self.screen.display))
            seen.extend((notices[-1], shown) for shown in frames if notices)
            return done

    terminal = Watched(80)
    progress = RunProgress("job-abcdefghijkl", "x", 100)
    follower = LiveFollower(progress, console_on(terminal, 80), 0.001)
    follower.show(
        event(id, "state", state=("queued", "starting", "running")[id % 3], reason="r") for id in range(1, 60)
    )
    assert len(seen) >= 59
    assert all(notice == shown for notice, shown in seen)


def test_a_terminal_that_is_resized_shows_whole_rows_again() -> None:
    terminal = Emulated(120)
    console = console_on(terminal, 120)
    follower = LiveFollower(RunProgress("job-abcdefghijkl", "x", 100), console, 0.001)

    def told() -> Iterator[Event]:
        yield from (event(id, "state", state="queued", reason=f"reason-{id} " + "word " * 30) for id in (1, 2))
        yield event(3, "metric", step=1, loss=2.5)
        # As terminals that lay rows out anew: what was wider than the window goes on in the next row.
        rows = [row.rstrip() for row in terminal.screen.display[: terminal.screen.cursor.y + 1]]
        console.width = 60
        terminal.screen.resize(ROWS, 60)
        terminal.screen.reset()
        parts = [row[first : first + 60] for row in rows for first in range(0, max(1, len(row)), 60)]
        terminal.write("\n".join(parts))
        yield event(4, "state", state="running", reason="after")

    follower.show(told())
    rows = [row.rstrip() for row in terminal.screen.display]
    text = " ".join(" ".join(rows).split())
    assert max(map(cell_len, rows)) <= 60
    assert [text.count(f"reason-{id}") for id in (1, 2)] == [1, 1]
    assert sum("step 1 / 100" in row for row in rows) == 1, "one frame"
    assert sum("job-abcdefghijkl" in row for row in rows) == 1
    assert sum("━" in row for row in rows) == 1
    assert sum("running: after" in row for row in rows) == 1


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_frame_fits_and_its_id_and_state_are_whole(columns: int) -> None:
    progress = RunProgress("job-abcdefghijkl", "翻訳" * 20, 4_000)
    progress.take(event(1, "state", state="recovering", reason="x"))
    layers = [{"layer": 1, "load": [0, 1, 2, 3], "rejected": 0.1, "dropped": 0.3}]
    progress.take(event(2, "metric", step=1_000, loss=2.5, nll=2.4, tokens_per_s=123_456.0, lr=1e-3, layers=layers))
    progress.take(event(3, "checkpoint", step=1_000))
    terminal = Emulated(columns)
    console = console_on(terminal, columns)
    lines = console.render_lines(frame(progress, columns, ROWS), pad=False)
    rows = ["".join(segment.text for segment in line) for line in lines]
    assert max(map(cell_len, rows)) <= columns
    if columns >= 40:
        assert "job-abcdefghijkl  recovering" in rows[0]
        for figure in ("loss 2.500", "nll 2.400", "tokens/s 123,456", "lr 1.0e-3", "checkpoint 1,000"):
            assert any(figure in row for row in rows), figure


def test_checkpoints_are_a_figure_and_no_lines() -> None:
    """One every step would push everything else off the screen."""
    terminal = Emulated(80)
    follower = LiveFollower(RunProgress("job-abcdefghijkl", "x", 100), console_on(terminal, 80), 0.001)
    told = [event(1, "state", state="running", reason="r")]
    for step in range(1, 51):
        told += [event(2 * step, "metric", step=step, loss=2.5), event(2 * step + 1, "checkpoint", step=step)]
    follower.show(told)
    rows = [row for row in terminal.rows if row]
    assert len(rows) < 8
    assert sum("checkpoint 50" in row for row in rows) == 1


def preparing(id: int, stage: str, share: float | None, seconds: float, num_done: int = 0) -> Event:
    record = PreparationRecord(stage, share, num_done, seconds)
    return event(id, "log", level="info", message=record.in_words(), preparing=record.to_plain())


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_preparation_of_data_has_a_bar_and_an_estimate(columns: int) -> None:
    progress = RunProgress("job-abcdefghijkl", "x", 100)
    console = console_on(Emulated(columns), columns)

    def row() -> str:
        lines = console.render_lines(frame(progress, columns, ROWS), pad=False)
        rows = ["".join(segment.text for segment in line).rstrip() for line in lines]
        assert max(map(cell_len, rows)) <= columns
        return rows[1]

    progress.take(event(1, "state", state="starting", reason=""))
    progress.take(preparing(2, "encoding", 0.25, 10.0))
    if columns >= 80:
        assert row().endswith(" preparing data: encoding, 25%  0:30 left")
        assert "━" in row()
    else:
        assert "preparing data: encoding" in row()
    progress.take(preparing(3, "encoding", None, 20.0, num_done=12_000))
    assert "preparing data: encoding, 12,000" in row()
    progress.take(event(4, "log", level="info", message="data took 31.2 s", record="phase"))
    assert "step 0 / 100" in row()
    progress.take(preparing(5, "encoding", 0.5, 20.0))
    progress.take(event(6, "metric", step=1, loss=2.5))
    assert "step 1 / 100" in row()


@pytest.mark.parametrize(("last", "expected"), [("encoding", True), (None, False)])
def test_show_says_how_far_the_data_is_prepared(last: str | None, expected: bool) -> None:
    """As long as that is the last thing that the job told of."""
    events = [preparing(1, "reading", 0.1, 5.0), preparing(2, "encoding", 0.75, 30.0)]
    if last is None:
        events.append(event(3, "log", level="info", message="data took 40 s", record="phase"))
    script = Script(events=[told.model_dump(mode="json") for told in events])
    script.job = {"name": "x", "state": "starting", "attempt": 1, "step": 0, "num_steps": 100, "storage": "/s"}
    script.plays = [all_then_silence]
    with serving(script) as url:
        done = shardyard("show", JOB_ID, url=url)
    assert done.returncode == 0, done.stderr
    assert ("preparing data: encoding, 75%  0:10 left" in done.stdout) == expected


def all_then_silence(handler: Handler, owed: list[dict[str, Any]]) -> None:
    """As a job that goes on has it: `show` does not wait for its end."""
    for told in owed:
        handler.send_chunk(as_sse(told))
    handler.server.script.closing.wait()
    handler.break_off()
