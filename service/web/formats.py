"""Numbers, times and states as text. `static/modules/format.js` writes them the same way in the browser."""

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

NOTHING = "–"


def number(value: Any) -> str:
    """`12,345`, `0.01234`, `1.23e-7`; `NaN` and `∞` by their signs, `–` for None."""
    if value is None:
        return NOTHING
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    magnitude = abs(value)
    if isinstance(value, int) or (value.is_integer() and magnitude < 1e15):
        return f"{int(value):,}"
    if magnitude < 1e-3 or magnitude >= 1e7:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.4g}" if magnitude < 1000 else f"{value:,.0f}"


def percent(part: float, whole: float) -> str:
    """`42%` of two numbers; `100%` only for all of it."""
    if not whole:
        return "0%"
    return "100%" if part >= whole else f"{min(99, math.floor(100 * part / whole))}%"


def size(num_bytes: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:,.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:,.1f} {unit}"


def duration(seconds: float) -> str:
    """`12 s`, `3 min 20 s`, `5 h 12 min`, `3 d 4 h`: the two largest units."""
    left_s = max(0, round(seconds))
    parts: list[str] = []
    for name, unit_s in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left_s = divmod(left_s, unit_s)
        if count or (name == "s" and not parts):
            parts.append(f"{count} {name}")
        elif parts:
            break
    return " ".join(parts[:2])


def duration_fine(seconds: float) -> str:
    """`12.3 ms`, `1.25 s`, then as `duration`: for what may take less than a second."""
    if seconds >= 60:
        return duration(seconds)
    return f"{number(seconds * 1000)} ms" if seconds < 1 else f"{number(seconds)} s"


def ago(time: str | None, now: datetime | None = None) -> str:
    """`just now`, `5 min ago`, `3 d ago`: the largest unit since a time of the API."""
    if time is None:
        return NOTHING
    seconds = ((now or datetime.now(UTC)) - datetime.fromisoformat(time)).total_seconds()
    return "just now" if seconds < 10 else f"{duration(seconds).split(' ')[0]} {duration(seconds).split(' ')[1]} ago"


def moment(time: str | None) -> str:
    """`2026-12-01 09:30:05 UTC` of a time of the API."""
    return NOTHING if time is None else f"{datetime.fromisoformat(time).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


FILTERS: dict[str, Callable[..., Any]] = {
    "ago": ago,
    "duration": duration,
    "duration_fine": duration_fine,
    "moment": moment,
    "number": number,
    "percent": percent,
    "size": size,
}
