"""Balanced pipeline stages."""

from collections.abc import Sequence

_BISECTIONS = 60
_ROUNDING = 1 + 1e-9  # above that of sums in another order


def balanced_stages(layer_seconds: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Number of layers of each stage, at least one, such that the slowest stage is as fast as possible, and then each
    as close to the mean as that allows, from the last one on.

    `layer_seconds`: by layer, the embeddings with the first, the head with the last.
    """
    assert 1 <= num_stages <= len(layer_seconds)
    limit_s, end, lengths = _least_limit_s(layer_seconds, num_stages) * _ROUNDING, len(layer_seconds), []
    for num_left in range(num_stages - 1, 0, -1):  # stages before this one
        mean_s = sum(layer_seconds[:end]) / (num_left + 1)
        start, stage_s = end, 0.0
        while start > num_left:  # a layer is left for each of them
            next_s = layer_seconds[start - 1]
            if start < end and stage_s + next_s > limit_s:
                break
            if start < end and stage_s + next_s / 2 > mean_s and _fits(layer_seconds[:start], num_left, limit_s):
                break
            start, stage_s = start - 1, stage_s + next_s
        lengths.append(end - start)
        end = start
    return (end, *reversed(lengths))


def _least_limit_s(layer_seconds: Sequence[float], num_stages: int) -> float:
    """Seconds of the slowest stage of the best cut, by bisection."""
    low, high = max(layer_seconds), sum(layer_seconds)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(layer_seconds, num_stages, middle) else (middle, high)
    return high


def _fits(layer_seconds: Sequence[float], num_stages: int, limit_s: float) -> bool:
    """Whether the layers fit in at most `num_stages` stages of at most `limit_s`."""
    stage_s, number = 0.0, 1
    for seconds in layer_seconds:
        if seconds > limit_s:
            return False
        if stage_s + seconds > limit_s:
            number, stage_s = number + 1, 0.0
        stage_s += seconds
    return number <= num_stages and (num_stages > 0 or not layer_seconds)
