"""Evaluation scores: one row for each task and metric."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Score:
    """Value of a metric for a model on a task."""

    task: str
    metric: str
    value: float
    stderr: float | None
    """Standard error, by bootstrap if there is no formula; None if unknown."""
    higher_is_better: bool
    num_documents: int


@dataclass(frozen=True)
class TaskScores:
    """All scores of a model."""

    rows: tuple[Score, ...]
    num_cut: int
    """Contexts truncated to the model's training length."""


@dataclass(frozen=True)
class ScoreComparison:
    """Score of a model, with that of its pretrained base model, if any."""

    score: Score
    base: Score | None

    @property
    def difference(self) -> float | None:
        return None if self.base is None else self.score.value - self.base.value

    def to_plain(self) -> dict[str, Any]:
        """JSON value; non-finite numbers become null."""
        plain = _plain(self.score)
        if self.base is not None:
            plain["base"] = {name: value for name, value in _plain(self.base).items() if name in ("value", "stderr")}
            plain["difference"] = _finite(self.difference)
        return plain


def compare_scores(scores: TaskScores, base: TaskScores | None) -> Sequence[ScoreComparison]:
    """Pair a model's scores with those of its base on the same tasks."""
    base_rows: Sequence[Score | None] = [None] * len(scores.rows) if base is None else base.rows
    return [ScoreComparison(score, base_score) for score, base_score in zip(scores.rows, base_rows, strict=True)]


def _plain(score: Score) -> dict[str, Any]:
    return {
        "task": score.task, "metric": score.metric, "value": _finite(score.value), "stderr": _finite(score.stderr),
        "higher_is_better": score.higher_is_better, "num_documents": score.num_documents,
    }  # fmt: skip


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
