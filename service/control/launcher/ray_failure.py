"""Ray's messages about drivers that ended."""

import re
import signal
from contextlib import suppress
from dataclasses import dataclass

_FAILED = re.compile(
    r"Job entrypoint command failed with exit code (?P<code>-?\d+)"
    r"(?:\. No logs available\.|, last available logs[^\n]*:\n(?P<output>.*))",
    re.DOTALL,
)
"""Ray's message about a driver that failed, with the end of its log."""
_PREEMPTED = "the actor's node was preempted"
"""Part of Ray's message about a driver on a preempted node."""
_ACTOR_DETAILS = re.compile(r"^\t(class_name|actor_id|pid|name|namespace|ip): .*\n", re.MULTILINE)
"""Lines between event and cause in Ray's message about a lost driver."""


@dataclass(frozen=True)
class DriverFailure:
    """A driver's end, as Ray describes it."""

    message: str
    """Reason in one line."""
    output: str = ""
    """The driver's last output, which Ray appends to its message."""
    exit_code: int | None = None
    """None if its process was lost, and minus the signal's number if that killed it."""
    preempted: bool = False
    """Whether its node was preempted."""


def parse_failure(message: str) -> DriverFailure:
    """Parse Ray's message about a job that ended."""
    match = _FAILED.match(message)
    if match is None:
        return DriverFailure(" ".join(_ACTOR_DETAILS.sub("", message).split()), preempted=_PREEMPTED in message)
    code, output = int(match["code"]), (match["output"] or "").strip("\n")
    ending = f"exit code {code}"
    if code < 0:
        with suppress(ValueError):
            ending = f"killed by {signal.Signals(-code).name}"
    reason = f"{ending}: {last_line(output)}" if output.strip() else f"{ending}; no output"
    return DriverFailure(reason, output, code, _PREEMPTED in message and not output)


def last_line(text: str) -> str:
    """Last line of Ray's response: errors are tracebacks."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" .")]
    return lines[-1][:500] if lines else "nothing"
