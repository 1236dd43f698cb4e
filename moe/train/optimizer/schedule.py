"""Learning rate schedule: linear warm-up, then decay."""

import math

from moe.spec import TrainSpec


def learning_rate(train: TrainSpec, step: int) -> float:
    """Learning rate of the update after `step` finished steps; the first update has step 0.

    With w = warmup_steps and n = num_steps, update number t = step + 1 gets peak_lr times
      t / w                                           while t < w,
      sqrt(max(w, 1) / t)                             under inverse_sqrt (arXiv 1706.03762, section 5.3),
      f + (1 - f) * (1 + cos(pi * progress)) / 2      under cosine,
      f + (1 - f) * (1 - progress)                    under linear,
      1                                               under constant,
    where progress = (step - w) / (n - w), which stays below 1, and f = final_fraction. It depends on the step only,
    so there is no state to restore.
    """
    peak, warmup, update = train.optimizer.peak_lr, train.warmup_steps, step + 1
    if update < warmup:
        return peak * update / warmup
    return peak * _decay(train, step, warmup)


def _decay(train: TrainSpec, step: int, warmup: int) -> float:
    final = train.schedule.final_fraction
    progress = min(1.0, max(0.0, (step - warmup) / max(1, train.num_steps - warmup)))
    match train.schedule.decay:
        case "inverse_sqrt":
            return math.sqrt(max(1, warmup) / (step + 1))
        case "cosine":
            return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
        case "linear":
            return final + (1 - final) * (1 - progress)
        case "constant":
            return 1.0
