"""Durations as users write them: `90s`, `10m`, `1h30m`, `2d`."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from moe.spec.errors import RuleError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(?:\d{1,9}[smhd])+")


def _duration(text: str) -> str:
    if not _DURATION.fullmatch(text) or seconds_of(text) <= 0:
        raise RuleError("invalid_value", "must be a duration", "write it as 90s, 10m, 1h30m or 2d")
    return text


def seconds_of(duration: str) -> float:
    """Return the seconds of a well-formed duration."""
    return float(sum(int(count) * _UNITS_S[unit] for count, unit in re.findall(r"(\d+)([smhd])", duration)))


Duration = Annotated[str, Field(max_length=40), AfterValidator(_duration)]
