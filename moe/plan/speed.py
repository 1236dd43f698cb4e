"""Comparison of speeds in words; percentages are of tokens per second, not of step times."""

_TIMES = 2
"""Ratio from which a speed is given as a multiple."""
MIN_CHANGE = 0.0005
"""Least change that is not rounded to 0.0%."""


def describe_speed(step_s: float, than_s: float) -> str:
    """Compare two steps of equal tokens: `12.0% faster`, `10.7% slower`, `2.3 times as fast`, `as fast`."""
    ratio = than_s / step_s
    if abs(ratio - 1) < MIN_CHANGE:
        return "as fast"
    if ratio >= _TIMES:
        return f"{ratio:,.1f} times as fast"
    if ratio <= 1 / _TIMES:
        return f"{1 / ratio:,.1f} times as slow"
    return f"{ratio - 1:.1%} faster" if ratio > 1 else f"{1 - ratio:.1%} slower"
