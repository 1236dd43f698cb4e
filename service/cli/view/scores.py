"""Table of task scores of a model and its base model."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe.evaluation.scores import Score, ScoreComparison
from service.cli.view.printable import printable


def scores_view(rows: Sequence[ScoreComparison], base: str | None, num_cut: int, max_tokens: int) -> RenderableType:
    """A row per task and metric; `base`: the base model's folder."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("task", overflow="ellipsis", max_width=40)
    table.add_column("metric", no_wrap=True)
    for label in ("documents", "value", *(("base", "difference") if base is not None else ())):
        table.add_column(label, justify="right", no_wrap=True)
    for row in rows:
        score = row.score
        metric = f"{score.metric} {'↑' if score.higher_is_better else '↓'}"
        cells = [printable(score.task), metric, f"{score.num_documents:,}", _score_text(score)]
        if row.base is not None and row.difference is not None:
            is_better = (row.difference > 0) == score.higher_is_better
            style = "" if not row.difference else "green" if is_better else "red"
            table.add_row(*cells, _score_text(row.base), Text(f"{row.difference:+.4f}", style))
        else:
            table.add_row(*cells)
    notes = [] if base is None else [Text(f"base: {printable(base)}", "dim")]
    if num_cut:
        words = (
            "context was truncated at its beginning" if num_cut == 1 else "contexts were truncated at their beginning"
        )
        notes.append(Text(f"{num_cut:,} {words}: the model was trained on texts of {max_tokens:,} tokens", "dim"))
    return Group(table, *notes)


def _score_text(score: Score) -> str:
    spread = "" if score.stderr is None else f" ± {score.stderr:.4f}"
    return f"{score.value:.4f}{spread}"
