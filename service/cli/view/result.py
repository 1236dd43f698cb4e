"""The demo's final summary: report, checkpoint, and resources used."""

import shlex
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.rule import Rule
from rich.text import Text

from moe.records import StoredCheckpoint
from service.cli.view.amounts import duration, num_bytes
from service.cli.view.progress import RATE_WINDOW_STEPS
from service.cli.view.report import ReportView

PAGE_WIDTH = 120

if TYPE_CHECKING:
    from service.cli.footprint import Footprint
    from service.cli.view.progress import RunProgress
    from service.client import Job


def training_summary(
    job: "Job",
    report: ReportView,
    checkpoints: list[StoredCheckpoint],
    progress: "RunProgress",
    num_workers: int,
    use: str | None,
) -> RenderableType:
    """Report, examples, expert loads, speed, checkpoint; `use`: beginning of the next command."""
    return Group(
        Text(""),
        _heading(f"{job.name} after {job.step:,} steps"),
        report.scores(),
        Text(""),
        *_examples(report),
        _heading("model"),
        *_experts(progress),
        *_speed(progress, num_workers),
        *_checkpoint(checkpoints),
        *_next(job, report, use),
        Text(""),
    )


def _heading(title: str) -> RenderableType:
    """A titled rule, at most a page wide in a pipe."""
    return Constrain(Rule(title, style="dim"), PAGE_WIDTH)


def _examples(report: ReportView) -> list[RenderableType]:
    examples = report.examples()
    return [] if examples is None else [_heading(report.examples_are), examples, Text("")]


def _next(job: "Job", report: ReportView, use: str | None) -> list[Text]:
    if use is None:
        return []
    line = f"  {use} {job.id} {shlex.quote(report.text_to_try())}"
    return [Text("next commands", "bold"), Text(line, "bold cyan")]


def footprint_line(footprint: "Footprint") -> Text:
    """Measured time and memory."""
    line = Text("measured", "bold")
    line.append(f"  {duration(footprint.seconds)} from start to stop", "")
    if footprint.peak_bytes:
        line.append(
            f", at most {num_bytes(footprint.peak_bytes)} of memory in {footprint.peak_processes} processes", ""
        )
    return line


def _experts(progress: "RunProgress") -> list[Text]:
    lines = []
    for layer in progress.layers():
        num_used = len(layer.load) - layer.num_unused
        shares = layer.shares
        lines.append(
            Text(
                f"layer {layer.layer}: {num_used} of {len(layer.load)} experts used, {min(shares):.1f}x "
                f"to {max(shares):.1f}x an even share"
            )
        )
    return lines


def _speed(progress: "RunProgress", num_workers: int) -> list[Text]:
    if progress.tokens_per_s is None:
        return []
    line = Text(f"{progress.tokens_per_s:,.0f} tokens/s, median of the last {RATE_WINDOW_STEPS} steps")
    if num_workers > 1:
        line.append(
            f"; one worker on the same CPUs would be faster: {num_workers} show tokens travelling "
            "between processes, as on a cluster",
            "dim",
        )
    return [line]


def _checkpoint(checkpoints: list[StoredCheckpoint]) -> list[Text]:
    intact = [checkpoint for checkpoint in checkpoints if not checkpoint.fault]
    if not intact:
        return []
    newest = intact[-1]
    return [Text(f"checkpoint of step {newest.step:,}, {num_bytes(newest.size_bytes or 0)}: {newest.path}")]
