"""Learning rate schedule: linear warm-up, then decay."""

import math
from typing import Literal

from moe.spec import TrainSpec

_Shape = Literal["cosine", "linear", "1-sqrt"]


def learning_rate(train: TrainSpec, step: int) -> float:
    """Learning rate of the update after `step` finished steps; the first update has step 0.

    With w = warmup_steps, n = num_steps, d = decay_steps and f = final_fraction, update number t = step + 1 gets
    peak_lr times
      t / w                                     while t < w,
      sqrt(max(w, 1) / t)                       under inverse_sqrt (arXiv 1706.03762, section 5.3),
      1                                         under constant,
      f + (1 - f) * shape(progress)             otherwise, where progress grows from 0 and stays below 1:
        (step - w) / (n - w)                      under cosine and linear,
        num_cycles * (step - w) / (n - w) mod 1   under cosine_with_restarts,
        max(0, (step - (n - d)) / d)              under warmup_stable_decay,
    and shape(x) is (1 + cos(pi * x)) / 2 for cosines, 1 - x if linear, 1 - sqrt(x) for `1-sqrt`. It depends on the step
    only, so there is no state to restore.
    """
    peak, warmup, update = train.optimizer.peak_lr, train.warmup_steps, step + 1
    if update < warmup:
        return peak * update / warmup
    return peak * _decay(train, step, warmup)


def _decay(train: TrainSpec, step: int, warmup: int) -> float:
    schedule = train.schedule
    shape: _Shape
    done, total = max(0, step - warmup), max(1, train.num_steps - warmup)
    match schedule.decay:
        case "inverse_sqrt":
            return math.sqrt(max(1, warmup) / (step + 1))
        case "constant":
            return 1.0
        case "cosine" | "linear":
            shape, progress = schedule.decay, min(1.0, done / total)
        case "cosine_with_restarts":
            shape, progress = "cosine", (schedule.num_cycles or 2) * done % total / total
        case "warmup_stable_decay":
            shape, decay_start = schedule.decay_shape or "1-sqrt", train.num_steps - train.decay_steps
            progress = min(1.0, max(0, step - decay_start) / max(1, train.decay_steps))
    return schedule.final_fraction + (1 - schedule.final_fraction) * _factor(shape, progress)


def _factor(shape: _Shape, progress: float) -> float:
    match shape:
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        case "linear":
            return 1 - progress
        case "1-sqrt":
            return 1 - math.sqrt(progress)
