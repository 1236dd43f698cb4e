"""Details of a job for `show`, and the end of a watched job."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from service.cli.view.amounts import duration, moment, num_bytes, rate
from service.cli.view.jobs import state
from service.cli.view.kinds import report_view, words_of
from service.cli.view.preparation import describe_preparation
from service.cli.view.printable import printable, printable_lines
from service.cli.view.ranks import gpu_use, rank_rows

BAR_WIDTH = 20
MAX_NUMBERS = 6

if TYPE_CHECKING:  # imported only with a record: importing takes 0.1 s
    from moe.records import PreparationRecord
    from service.cli.view.report import ReportView
    from service.client import Job


def job_details(
    job: "Job", preparation: "PreparationRecord | None" = None, samples: Sequence[dict[str, Any]] = ()
) -> RenderableType:
    """Details of a job: state and reason, storage, metrics, result. `samples`: metrics with completions."""
    data = job.data
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("job", Text(job.id, "bold"))
    grid.add_row("name", job.name)
    if data.get("labels"):
        grid.add_row("labels", ", ".join(f"{key}={value}" for key, value in data["labels"].items()))
    reason = f"  {printable(job.reason)}" if job.reason else ""
    grid.add_row("state", Text.assemble(state(job.state), (reason, "dim")))
    grid.add_row("step", f"{job.step:,} of {job.num_steps:,}")
    if preparation is not None:
        bar = Table.grid(padding=(0, 1))
        progress_bar = ProgressBar(total=1.0, completed=preparation.share or 0.0, width=BAR_WIDTH)
        bar.add_row(progress_bar, describe_preparation(preparation))
        grid.add_row("data", bar)
    if data.get("attempt"):
        grid.add_row("attempt", str(data["attempt"]))
    for label, key in (("submitted", "created_at"), ("started", "started_at"), ("finished", "finished_at")):
        if data.get(key):
            grid.add_row(label, moment(data[key]))
    if run := data.get("run"):
        if uses := gpu_use(run):
            grid.add_row("GPUs", uses)
        grid.add_row("ranks", rank_rows(run))
    if metric := data.get("last_metric"):
        grid.add_row("last step", _metric_line(metric))
    if checkpoint := data.get("last_checkpoint"):
        grid.add_row("checkpoint", _checkpoint_text(checkpoint, is_over=job.ended))
    if failure := data.get("last_failed_checkpoint"):
        style = "red" if data.get("checkpoints_failing") else "dim"
        text = f"of step {failure['step']:,} at {moment(failure['time'])}: {printable(failure['reason'])}"
        grid.add_row("failed to save", Text(text, style))
    grid.add_row("storage", job.storage)
    if data.get("dashboard_url"):
        grid.add_row("Ray dashboard", str(data["dashboard_url"]))
    for tracked in data.get("tracking") or ():
        location = printable(tracked["place"] or "not yet")
        trouble = f"  cannot be written: {printable(tracked['trouble'])}" if tracked["trouble"] else ""
        grid.add_row(tracked["tracker"], Text.assemble(location, (trouble, "red")))
    report = report_view(job)
    parts = [*_sample_texts(samples), *([] if report is None else _report(report))]
    return Group(grid, *parts) if parts else grid


def _sample_texts(points: Sequence[dict[str, Any]]) -> Iterator[RenderableType]:
    """Prompts, each followed by the model's completion in bold."""
    if not points:
        return
    from moe.records import StepRecord  # takes 0.1 s

    for step in map(StepRecord.read, points):
        yield Text(f"\ncompletions after step {step.step:,}", "bold")
        for sample in step.samples or ():
            yield Text.assemble((printable_lines(sample.prompt), ""), (printable_lines(sample.completion), "bold"))


def _checkpoint_text(checkpoint: dict[str, Any], is_over: bool) -> str:
    """The last checkpoint, with its age unless the job is over."""
    time, size_bytes, age = str(checkpoint["time"]), _number(checkpoint, "size_bytes"), ""
    if not is_over:
        age_s = (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()
        age = f", {duration(age_s)} ago"
    size = f", {num_bytes(size_bytes)}" if size_bytes is not None else ""
    return f"of step {checkpoint['step']:,}, committed at {moment(time)}{age}{size}"


def outcome(job: "Job", hints: bool = True) -> RenderableType:
    """End of a watched job; with `hints`, next commands and the report."""
    line = Text.assemble((job.id, "bold"), " ", state(job.state))
    line.append(f": {printable(job.reason)}" if job.reason else f" at step {job.step:,}")
    if not hints:
        return line
    if job.state != "succeeded":
        line.append(f"\n'shardyard logs {job.id}' shows the workers' logs")
        line.append(f"\n'shardyard resume {job.id}' continues from its last checkpoint, if any")
        return line
    line.append("\n" + words_of(job).to_use_it.format(job=job.id))
    report = report_view(job)
    return line if report is None else Group(line, *_report(report))


def _report(report: "ReportView") -> list[RenderableType]:
    examples = report.examples()
    parts: list[RenderableType] = [Text(""), report.scores()]
    return parts if examples is None else [*parts, Text(""), Text(report.examples_are, "bold"), examples]


def _metric_line(metric: dict[str, Any]) -> str:
    losses = ((name, _number(metric, name)) for name in ("loss", "nll"))
    parts = [f"{name} {value:.3f}" for name, value in losses if value is not None]
    if (tokens_per_s := _number(metric, "tokens_per_s")) is not None:
        parts.append(f"{tokens_per_s:,.0f} tokens/s")
    if (learning_rate := _number(metric, "lr")) is not None:
        parts.append(f"lr {rate(learning_rate)}")
    numbers: dict[str, Any] = metric["numbers"] if isinstance(metric.get("numbers"), dict) else {}
    for name in list(numbers)[:MAX_NUMBERS]:
        if (number := _number(numbers, name)) is not None:
            parts.append(f"{printable(name)} {number:.4g}")
    sources: dict[str, Any] = metric["source_tokens"] if isinstance(metric.get("source_tokens"), dict) else {}
    for name in list(sources)[:MAX_NUMBERS]:
        if (tokens := _number(sources, name)) is not None:
            parts.append(f"{printable(name)} {tokens:,.0f} tokens")
    return "  ".join(parts)


def _number(record: dict[str, Any], name: str) -> float | None:
    value = record.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
