"""A job in one tracker: events sent to the tracker process, and events that it has confirmed."""

import time
from dataclasses import dataclass, field

from moe.spec import JobSpec
from moe.spec.track import TrackerName
from service.control.store.tracked_runs import TrackedRunRow
from service.tracker.messages import TrackedRun
from service.tracker.places import TrackerPlaces

WINDOW_EVENTS = 2000
"""Maximum number of events that are sent and not confirmed; the others wait in the store."""
RETRY_FIRST_S, RETRY_MOST_S = 1.0, 60.0
ANSWER_TIMEOUT_S = 120.0
"""Time without a confirmation after which a tracker counts as not responding."""


@dataclass
class FollowedRun:
    """Progress of one row of `tracked_runs`, while this control plane writes it."""

    row: TrackedRunRow
    job_id: str
    spec: JobSpec
    has_sent_open: bool = False
    """Whether the tracker process has the order to open the run."""
    is_open: bool = False
    sent_to: int = 0
    written_to: int = 0
    stored_to: int = 0
    """Value of `written_to` in the store."""
    trouble: str = ""
    retry_wait_s: float = 0.0
    """Delay of the next order to open the run; 0 since the last confirmation."""
    retry_at: float = 0.0
    since: float = field(default_factory=time.monotonic)
    """Time of the last confirmation, or of the oldest order without one."""

    @classmethod
    def of_row(cls, row: TrackedRunRow, job_id: str, spec: JobSpec) -> "FollowedRun":
        event_id = row.written_to
        return cls(
            row, job_id, spec, sent_to=event_id, written_to=event_id, stored_to=event_id, trouble=row.trouble or ""
        )

    @property
    def tracker(self) -> TrackerName:
        return self.row.tracker  # type: ignore[return-value]

    @property
    def waits_for_checkpoint(self) -> bool:
        return bool(getattr(getattr(self.spec.track, self.tracker), "wait_for_checkpoint", False))

    @property
    def is_full(self) -> bool:
        return self.sent_to - self.written_to >= WINDOW_EVENTS

    @property
    def has_unconfirmed(self) -> bool:
        return self.sent_to > self.written_to

    def hangs(self) -> bool:
        """Whether the tracker has confirmed nothing for too long."""
        waits = self.has_unconfirmed or (self.has_sent_open and not self.is_open)
        return waits and not self.trouble and time.monotonic() - self.since > ANSWER_TIMEOUT_S

    def confirm(self, through: int) -> None:
        """Record the confirmation of events up to `through`."""
        self.written_to = max(self.written_to, through)
        self.retry_wait_s = self.retry_at = 0.0

    def delay_retry(self) -> None:
        """Delay the next attempt to open the run, twice as long as before. An error in one run of W&B ends the process
        of all runs, so a run that always fails must leave time to write the others."""
        self.retry_wait_s = min(RETRY_MOST_S, 2 * self.retry_wait_s or RETRY_FIRST_S)
        self.retry_at = time.monotonic() + self.retry_wait_s

    def begin_again(self) -> None:
        """Reopen the run, and send unconfirmed events again."""
        self.has_sent_open = self.is_open = False
        self.sent_to = self.written_to

    def facts(self, places: TrackerPlaces) -> TrackedRun:
        """Description of the run, for the order to open it."""
        tracker = self.tracker
        return TrackedRun(
            job_id=self.job_id,
            tracker=tracker,
            name=self.spec.name,
            labels=self.spec.labels,
            spec=self.spec.model_dump(mode="json"),
            fields=getattr(self.spec.track, tracker).model_dump(mode="json"),
            layers=self.spec.track.layers,
            every_steps=self.spec.track.every_steps,
            folder=places.folder,
            server=places.server(tracker, self.spec.track),
        )
