"""A frame of the live display: state, progress, metrics, expert loads."""

from datetime import UTC, datetime
from itertools import islice
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moe.records import PreparationRecord, StepRecord
from service.cli.view.amounts import duration, rate
from service.cli.view.bars import experts_per_bar, load_bars
from service.cli.view.jobs import STATE_STYLES
from service.cli.view.preparation import describe_preparation
from service.cli.view.printable import printable
from service.cli.view.progress import LOAD_WINDOW_STEPS, LayerLoad, RunProgress
from service.cli.view.ranks import describe_ranks

MIN_NAME = 8
MAX_NUMBERS = 6
FIGURE_GAP = "   "
CHART_WIDTH, WIDEST_CHART = 38, 64
"""80 columns hold two narrow charts side by side, 140 three."""
TALL, LOW = 5, 1
"""Height of a chart's bars: tall while few layers leave room."""
OTHER_ROWS = 9
"""Screen rows above and below the charts."""


def frame(progress: RunProgress, width: int, height: int, note: str = "", run: dict[str, Any] | None = None) -> Group:
    """Content of the screen; `run`: the ranks' last status. Keeps no reference to `progress`, which changes."""
    parts: list[RenderableType] = [_headline(progress, width)]
    if progress.preparation is not None:
        parts.append(preparation_bar(progress.preparation))
    else:
        parts.append(_bar(progress))
    if progress.metric is not None:
        parts.append(_figures(progress, width))
    if run is not None and not progress.is_over and (ranks := describe_ranks(run)) is not None:
        ranks.no_wrap, ranks.overflow = True, "ellipsis"
        parts.append(ranks)
    if layers := progress.layers():
        parts += [Text(""), charts(layers, width, max(LOW + 2, height - OTHER_ROWS))]
    if status_line := note or ("" if progress.preparation else progress.doing):
        parts.append(Text(status_line, style="bold yellow" if note else "dim", no_wrap=True, overflow="ellipsis"))
    parts.append(Text(""))  # the cursor's row, for an echoed ^C
    return Group(*parts)


def _headline(progress: RunProgress, width: int) -> Text:
    """Name, id and state; the name is cut to fit."""
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(progress.job_id, style="dim")
    line.append("  ")
    line.append(progress.state, style=STATE_STYLES.get(progress.state, ""))
    if progress.state_since is not None and not progress.is_over:
        age = datetime.now(UTC) - progress.state_since
        line.append(f" for {duration(age.total_seconds())}", style="dim")
    if progress.attempt is not None and progress.attempt > 1:
        line.append(f"  attempt {progress.attempt}", style="yellow")
    room = width - line.cell_len - 2
    if room < min(MIN_NAME, cell_len(progress.name)):
        return line
    name = Text(progress.name, "bold")
    name.truncate(room, overflow="ellipsis")
    return Text.assemble(name, "  ", line, no_wrap=True, overflow="ellipsis")


def preparation_bar(preparation: PreparationRecord) -> Table:
    """Progress bar of data preparation, with an estimate of the time left."""
    share = preparation.share
    bar = ProgressBar(total=1.0, completed=share or 0.0, pulse=share is None)
    return _bar_with(bar, describe_preparation(preparation))


def _bar_with(bar: ProgressBar, words: str) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True, overflow="ellipsis")
    grid.add_row(bar, words)
    return grid


def _bar(progress: RunProgress) -> Table:
    count = f"step {progress.step:,} / {progress.num_steps:,}"
    share = f"{progress.step / progress.num_steps:4.0%}" if progress.num_steps else ""
    left = progress.seconds_left
    time_left = f"{duration(left)} left" if left is not None and progress.state == "running" else ""
    bar = ProgressBar(total=max(1, progress.num_steps), completed=progress.step)
    return _bar_with(bar, "  ".join(part for part in (count, share, time_left) if part))


def _figures(progress: RunProgress, width: int) -> Group:
    rows = [Text()]
    for label, value in figures(progress):
        figure = Text.assemble((f"{label} ", "dim"), (value, "bold"))
        if rows[-1] and rows[-1].cell_len + len(FIGURE_GAP) + figure.cell_len > width:
            rows.append(Text())
        rows[-1] = Text.assemble(rows[-1], FIGURE_GAP if rows[-1] else "", figure, no_wrap=True)
    return Group(*rows)


def figures(progress: RunProgress) -> list[tuple[str, str]]:
    """(label, value) of the latest step's metrics that are present."""
    metric = progress.metric or StepRecord()
    entries = [
        ("loss", f"{metric.loss:.3f}" if metric.loss is not None else None),
        ("nll", f"{metric.nll:.3f}" if metric.nll is not None else None),
        ("tokens/s", f"{metric.tokens_per_s:,.0f}" if metric.tokens_per_s is not None else None),
        ("lr", rate(metric.lr) if metric.lr is not None else None),
    ]
    entries += [
        (printable(name), f"{number:.4g}")
        for name, number in islice((metric.numbers or {}).items(), MAX_NUMBERS)
        if number is not None
    ]
    entries += [
        (printable(name), f"{tokens:,} tokens")
        for name, tokens in islice((metric.source_tokens or {}).items(), MAX_NUMBERS)
    ]
    if progress.checkpoint_step is not None:
        entries.append(("checkpoint", f"{progress.checkpoint_step:,}"))
    return [(label, value) for label, value in entries if value is not None]


def charts(layers: list[LayerLoad], width: int, rows: int) -> RenderableType:
    """Charts of the layers that fit in `rows`, side by side if possible."""
    num_columns = max(1, min(len(layers), width // CHART_WIDTH))
    chart_width = min(WIDEST_CHART, (width - 2 * (num_columns - 1)) // num_columns)
    num_rows = -(-len(layers) // num_columns)
    height = TALL if num_rows * (TALL + 2) <= rows else LOW
    visible_layers = layers[: max(1, rows // (height + 2)) * num_columns]
    heading = f"expert loads over {LOAD_WINDOW_STEPS} steps, relative to an even share"
    if (in_a_bar := experts_per_bar(max(len(layer.load) for layer in layers), chart_width)) > 1:
        heading += f"; {in_a_bar} experts per bar"
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(num_columns):
        grid.add_column(width=chart_width, no_wrap=True)
    for first in range(0, len(visible_layers), num_columns):
        grid.add_row(*(chart(layer, chart_width, height) for layer in visible_layers[first : first + num_columns]))
    parts: list[RenderableType] = [Text(heading, "dim", no_wrap=True, overflow="ellipsis"), grid]
    if len(visible_layers) < len(layers):
        parts.append(Text(f"and {len(layers) - len(visible_layers)} more MoE layers", style="dim"))
    return Group(*parts)


def chart(layer: LayerLoad, width: int, height: int) -> RenderableType:
    """Bars of one layer below a caption with its load balance."""
    shares = layer.shares
    caption = Text(f"layer {layer.layer}", style="bold", no_wrap=True, overflow="ellipsis")
    if layer.num_unused:
        caption.append(f"  ≤{max(shares):.1f}x", style="dim")
        caption.append(f"  {layer.num_unused} unused", style="bold red")
    else:
        caption.append(f"  {min(shares):.1f}x to {max(shares):.1f}x", style="dim")
    if layer.dropped >= 0.005:
        caption.append(f"  {layer.dropped:.0%} dropped", style="dim")
    return Group(caption, *load_bars(shares, width, height), Text(""))
