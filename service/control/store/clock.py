"""Stored times: whole microseconds since 1970 UTC."""

import time
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def now_us() -> int:
    return time.time_ns() // 1000


def to_us(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)


def to_datetime(time_us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=time_us)
