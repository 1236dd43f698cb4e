"""Decision whether a silent driver must be killed. No I/O.

A driver posts every second and answers its workers' heartbeats, from separate threads, however busy it is. Silence is
reported after 20 s. The driver is killed only if it is stopped, or if it is idle or unseen and has answered neither
the control plane nor its workers for minutes.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

SILENCE_S = 20.0
"""Silence after which a driver is examined and reported."""
STOPPED_S = 30.0
"""Silence after which a stopped driver is killed."""
SEEN_STOPPED_S = 5.0
"""Time for which it must be seen stopped: a snapshot may stop it briefly."""
UNANSWERED_S = 300.0
"""Silence towards control plane and workers after which an idle or unseen driver is killed. No native code in a
driver holds the GIL that long."""

ProcessState = Literal["stopped", "working", "idle", "unseen"]
"""`working`: uses CPU time. `unseen`: on another machine, or not found."""


@dataclass(frozen=True)
class SilentDriver:
    """Snapshot of a silent driver; times in seconds."""

    since: float
    """Time of its last message."""
    silent_s: float
    state: ProcessState
    process: str = ""
    """Process and host for messages; "" if unknown."""
    stopped_s: float = 0.0
    """Time for which it was seen stopped."""
    workers_heard: bool = False
    """Whether its workers have sent anything since."""
    unanswered_s: float = 0.0
    """Time since it last answered its first worker; 0 if unknown."""

    @property
    def is_frozen(self) -> bool:
        """Whether the driver must be killed."""
        if self.state == "stopped":
            return self.silent_s >= STOPPED_S and self.stopped_s >= SEEN_STOPPED_S
        return self.state != "working" and min(self.silent_s, self.unanswered_s) >= UNANSWERED_S

    def __str__(self) -> str:
        subject = f"its driver ({self.process})" if self.process else "its driver"
        predicate = "is stopped and has been silent" if self.state == "stopped" else "has been silent"
        description = f"{subject} {predicate} since {datetime.fromtimestamp(self.since, UTC):%Y-%m-%dT%H:%M:%SZ}"
        if self.is_frozen:
            return f"{description}: it is killed, and another attempt resumes from the newest checkpoint"
        clause = "training continues, but " if self.workers_heard else ""
        return f"{description}: {clause}workers that die or hang are not replaced until it runs again"
