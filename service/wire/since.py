"""A time as users write it: absolute, or how long ago."""

import re
from datetime import UTC, datetime, timedelta

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AGO = re.compile(r"(?:\d{1,9}[smhd])+")
RULE = "must be a duration, such as 90s, 10m or 1h30m, or a time, such as 2026-01-31T12:00:00Z"


def parse_since(text: str) -> timedelta | datetime:
    """Parse a duration before now, or a time with time zone. Raises ValueError."""
    if _AGO.fullmatch(text):
        parts = re.findall(r"(\d+)([smhd])", text)
        return timedelta(seconds=min(sum(int(count) * _UNITS_S[unit] for count, unit in parts), 10**10))
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(RULE) from None
    if time.tzinfo is None:
        raise ValueError(RULE)
    return time.astimezone(UTC)
