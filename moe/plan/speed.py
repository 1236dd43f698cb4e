"""Comparison of speeds in words; percentages are of tokens per second, not of step times."""

_TIMES = 2
"""Ratio from which a speed is given as a multiple."""


def describe_speed(step_s: float, than_s: float) -> str:
    """Compare two steps of equal tokens: `12.0% faster`, `10.7% slower`, `less than 0.1% slower`, `2.3 times as
    fast`, `as fast`."""
    if step_s == than_s:
        return "as fast"
    ratio = than_s / step_s
    if ratio >= _TIMES:
        return f"{ratio:,.1f} times as fast"
    if ratio <= 1 / _TIMES:
        return f"{1 / ratio:,.1f} times as slow"
    return f"{format_change(ratio - 1)} {'faster' if ratio > 1 else 'slower'}"


def format_change(change: float) -> str:
    """Format a relative change without its sign: `12.0%`, or `less than 0.1%` rather than `0.0%`."""
    percentage = f"{abs(change):.1%}"
    return "less than 0.1%" if percentage == "0.0%" else percentage
