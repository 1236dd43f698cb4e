"""A driver that sends nothing: what is known of it, in words, and whether it is to be ended.

A driver speaks to the control plane once a second and answers its workers' heartbeats, each from a thread of its own,
however busy it is. One that does neither is named after a while. It is ended only where it cannot be honest: where it
is seen to be stopped, or where it has been idle, or out of sight, and has answered nobody for minutes.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

SILENCE_S = 20.0
"""Silence after which a driver is looked at, and named."""
STOPPED_S = 30.0
"""Silence after which one is ended that is seen to be stopped."""
UNANSWERED_S = 300.0
"""Silence after which one is ended that is idle, or on another machine: towards its workers, too. Native code may hold
Python's lock for a while, but a driver runs none that does so for minutes."""

ProcessState = Literal["stopped", "working", "idle", "unseen"]
"""`working`: takes CPU time. `unseen`: its process is on another machine, or was not found."""


@dataclass(frozen=True)
class SilentDriver:
    """One driver, at one moment; times in seconds."""

    since: float
    """Time of its last word."""
    silent_s: float
    state: ProcessState
    process: str = ""
    """Its process in words; "" where that is not known."""
    workers_heard: bool = False
    """Whether its workers have spoken to the control plane meanwhile."""
    unanswered_s: float = 0.0
    """Time for which its workers have had no answer of it either; 0 where they do not say."""

    @property
    def is_frozen(self) -> bool:
        """Whether it is to be ended."""
        if self.state == "stopped":
            return self.silent_s >= STOPPED_S
        return self.state != "working" and min(self.silent_s, self.unanswered_s) >= UNANSWERED_S

    def __str__(self) -> str:
        named = f"its driver ({self.process})" if self.process else "its driver"
        what = "is stopped and has sent nothing" if self.state == "stopped" else "has sent nothing"
        words = f"{named} {what} since {datetime.fromtimestamp(self.since, UTC):%Y-%m-%dT%H:%M:%SZ}"
        if self.is_frozen:
            return f"{words}: it is ended by force, and another attempt goes on from the newest checkpoint"
        goes_on = "training goes on, but " if self.workers_heard else ""
        return f"{words}: {goes_on}no worker that dies or hangs is replaced until it runs again"
