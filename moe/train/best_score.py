"""Best held-out loss of a run, which decides on its best checkpoint and on stopping early. No torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from moe.records import HeldOutLosses
from moe.spec import JobSpec
from moe.spec.resources import BestCheckpointSpec


@dataclass(frozen=True)
class BestScore:
    """Best value of `checkpoint.keep_best.metric` so far. Every checkpoint of a run stores it."""

    criterion: BestCheckpointSpec
    of_average: bool
    """Whether the average of the weights is evaluated."""
    step: int | None = None
    """Step of the best evaluation; None before the first one with a value."""
    value: float | None = None
    num_evaluations_since: int = 0
    """Evaluations without a better value since then."""

    @classmethod
    def of_job(cls, spec: JobSpec, plain: Mapping[str, Any] | None = None) -> "BestScore":
        """Score to continue with: `plain`, as a checkpoint stored it, if it compares with the job's; else none yet."""
        start = cls(spec.checkpoint.keep_best or BestCheckpointSpec(), spec.train.evaluation.use_ema)
        if plain is None or {key: plain.get(key) for key in ("criterion", "of_average")} != {
            "criterion": start.criterion.model_dump(), "of_average": start.of_average,
        }:  # fmt: skip
            return start
        return cls(**{**plain, "criterion": start.criterion})

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "criterion": self.criterion.model_dump()}

    def without_value(self) -> "BestScore":
        """Score to which the next evaluation with a value is better."""
        return replace(self, step=None, value=None)

    def after(self, step: int, losses: HeldOutLosses) -> "BestScore":
        """Score after an evaluation, with `step` set to this one if its value is the best so far."""
        value = held_out_value(losses, self.criterion.held_out_set)
        if value is None or not self._is_better(value):
            return replace(self, num_evaluations_since=self.num_evaluations_since + 1)
        return replace(self, step=step, value=value, num_evaluations_since=0)

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return True
        return value < self.value if self.criterion.mode == "min" else value > self.value

    def is_stale(self, num_evaluations: int | None) -> bool:
        """Whether that many evaluations in a row were no better; never if None."""
        return num_evaluations is not None and self.num_evaluations_since >= num_evaluations

    def __str__(self) -> str:
        return f"best {self.criterion.metric}: {self.value:.4f}, after step {self.step}"


def held_out_value(losses: HeldOutLosses, held_out_set: str | None) -> float | None:
    """Loss of one held-out set, or the mean over all that have one; None if there is no finite value."""
    values = [loss for name, loss in losses.items() if loss is not None and held_out_set in (None, name)]
    mean = fmean(values) if values else math.nan
    return mean if math.isfinite(mean) else None
