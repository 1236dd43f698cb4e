"""The live display on a terminal: at 80 and 140 columns no line is too long, and what must be there is."""

import re
import subprocess
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.service_cli.command import COMMAND, environment
from tests.service_cli.contract_server import JOB_ID, Handler, Script, as_sse, event, serving
from tests.service_cli.terminal import ESCAPE, on_a_terminal

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_STEPS = 30


def run_of(num_layers: int, num_experts: int) -> Script:
    """A run of 30 steps with warnings, a restart, checkpoints, wide characters and an expert that is never used."""
    told: list[dict] = [
        event(0, "state", None, state="queued", previous="queued", reason="waits for 漢字 " + "room " * 30),
        event(0, "state", state="running", previous="starting", reason="worker group 0 runs on 2 workers"),
        event(0, "log", level="info", message="reads the corpus العربية"),
    ]
    for step in range(1, NUM_STEPS + 1):
        layers = [
            {"layer": 2 * layer + 1, "load": [0, *range(1, num_experts)], "rejected": 0.1, "dropped": 0.031}
            for layer in range(num_layers)
        ]
        told.append(
            event(
                0, "metric", step=step, loss=5.5 - step / 10, nll=5.1, lr=2.5e-3, tokens_per_s=11_640.0, layers=layers
            )
        )
    told.append(event(0, "checkpoint", step=NUM_STEPS))
    told.append(event(0, "log", level="warning", message="\x1b[31mbeware\x1b[0m"))
    told.append(event(0, "state", state="succeeded", previous="running", reason=f"finished at step {NUM_STEPS}"))
    script = Script(job={"name": "translate-100-to-english", "state": "running", "step": 0, "num_steps": NUM_STEPS})
    script.events = [event(id, each["kind"], each["attempt"], **each["data"]) for id, each in enumerate(told, start=1)]

    def play(handler: Handler, owed: list[dict]) -> None:
        for each in owed:
            handler.send_chunk(as_sse(each))
        script.job |= {"state": "succeeded", "step": NUM_STEPS, "reason": f"finished at step {NUM_STEPS}"}
        handler.end_chunks()

    script.plays = [play]
    return script


@pytest.mark.sample(2)
@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize(("num_layers", "num_experts"), [(2, 8), (60, 8), (2, 512)])
def test_the_display_fits_the_terminal(columns: int, num_layers: int, num_experts: int) -> None:
    with serving(run_of(num_layers, num_experts)) as url:
        status, written = on_a_terminal(columns, "watch", JOB_ID, url=url)
    assert status == 0
    lines = [ESCAPE.sub("", line) for line in re.split(r"\r\n|\n|\r", written)]
    frames = written.split("\x1b[2K")
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
        done = subprocess.run(
            [*COMMAND, "watch", JOB_ID], env=environment(url), capture_output=True, text=True, check=False
        )
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "step 30/30  loss 2.500  nll 5.100  tokens/s 11,640  lr 2.5e-3" in done.stdout
    assert done.stdout.count("step ") < NUM_STEPS, "a line every few seconds, not one a step"


def test_a_terminal_that_cannot_draw_gets_plain_lines() -> None:
    with serving(run_of(2, 8)) as url:
        status, written = on_a_terminal(80, "watch", JOB_ID, url=url, PYTHONIOENCODING="ascii:replace", LC_ALL="C")
    assert status == 0
    assert "\x1b[2K" not in written


PLANNED = EXAMPLES / "deepseek-v3-1024-h100.yaml"
WHOLE = ("tokens/s", "split: fsdp 1024", "expert_fsdp 64", "next best", "rejected", "of 80.00 GiB")


def planned(columns: int, *options: str) -> list[str]:
    """The lines of a plan on a terminal of that width."""
    status, written = on_a_terminal(columns, "plan", str(PLANNED), *options, url="http://127.0.0.1:1")
    assert status == 0, written
    return [line.rstrip() for line in ESCAPE.sub("", written).replace("\r", "").splitlines()]


@pytest.mark.sample(1)
@pytest.mark.parametrize("columns", [80, 140])
def test_a_plan_fits_the_terminal(columns: int) -> None:
    """Columns stand beneath one another, sentences go on in the next line, and no word is cut."""
    lines = planned(columns, "--full")
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
    assert "what is more comes in more chunks and travels twice" in " ".join(text.split())


@pytest.mark.sample(1)
@pytest.mark.parametrize("columns", [80, 140])
def test_a_plan_in_short_is_a_verdict_and_a_table(columns: int) -> None:
    """The judgement comes first, within 45 lines, and no word is cut."""
    lines = planned(columns)
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
    lines = planned(columns, "--what-if", "experts=256,512,nodes=128")
    assert max(map(cell_len, lines)) <= columns
    assert [line.split()[:2] for line in lines if line.split()[1:2] == ["128"]] == [
        ["256", "128"], ["512", "128"],
    ]  # fmt: skip
