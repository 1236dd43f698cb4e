"""Numbers formatted for people."""

from datetime import datetime


def duration(seconds: float) -> str:
    """`0:07`, `2:13`, `1:02:45`, `3 d 4 h`."""
    rounded_s = max(0, round(seconds))
    if rounded_s >= 86_400:
        return f"{rounded_s // 86_400} d {rounded_s % 86_400 // 3600} h"
    hours, minutes, rest = rounded_s // 3600, rounded_s % 3600 // 60, rounded_s % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def num_bytes(amount: float) -> str:
    """`512 B`, `40 KiB`, `3.1 MiB`, `1.24 GiB`; GiB from 0.1 GiB on."""
    if amount >= 1024**3 / 10:
        return f"{amount / 1024**3:,.2f} GiB"
    if amount >= 1024**2:
        return f"{amount / 1024**2:.{1 if amount < 10 * 1024**2 else 0}f} MiB"
    return f"{amount / 1024:.0f} KiB" if amount >= 1024 else f"{amount:.0f} B"


def rate(learning_rate: float) -> str:
    """`2.5e-3`: scientific notation without the padding of `2.50e-03`."""
    mantissa, _, exponent = f"{learning_rate:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def moment(time: str | datetime | None) -> str:
    """`31 Jan 12:00:05` in local time; a dash for None."""
    if time is None:
        return "-"
    instant = datetime.fromisoformat(time) if isinstance(time, str) else time
    return instant.astimezone().strftime("%d %b %H:%M:%S")


def clock(time: datetime) -> str:
    """`12:00:05` in local time."""
    return time.astimezone().strftime("%H:%M:%S")
