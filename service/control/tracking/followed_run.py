"""A job as one tracker follows it: what was sent to the tracker process, and what it has confirmed."""

import time
from dataclasses import dataclass, field

from moe.spec import JobSpec
from moe.spec.track import TrackerName
from service.control.store.tracked_runs import TrackedRunRow
from service.tracker.messages import TrackedRun
from service.tracker.places import TrackerPlaces

WINDOW_EVENTS = 2000
"""Most events that are sent and not confirmed; the others wait in the store."""
ANSWER_TIMEOUT_S = 120.0
"""Time without a confirmation after which a tracker counts as not responding."""


@dataclass
class FollowedRun:
    """Progress of one row of `tracked_runs`, while this control plane writes it."""

    row: TrackedRunRow
    job_id: str
    spec: JobSpec
    is_asked: bool = False
    """Whether the tracker process was asked to open the run."""
    is_open: bool = False
    sent_to: int = 0
    written_to: int = 0
    stored_to: int = 0
    """Value of `written_to` in the store."""
    trouble: str = ""
    since: float = field(default_factory=time.monotonic)
    """Time of the last confirmation, or of the oldest order without one."""

    @classmethod
    def of_row(cls, row: TrackedRunRow, job_id: str, spec: JobSpec) -> "FollowedRun":
        place = row.written_to
        return cls(row, job_id, spec, sent_to=place, written_to=place, stored_to=place, trouble=row.trouble or "")

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
        waits = self.has_unconfirmed or (self.is_asked and not self.is_open)
        return waits and not self.trouble and time.monotonic() - self.since > ANSWER_TIMEOUT_S

    def begin_again(self) -> None:
        """Have the run opened again, and send what is not confirmed."""
        self.is_asked = self.is_open = False
        self.sent_to = self.written_to

    def facts(self, places: TrackerPlaces) -> TrackedRun:
        """What the tracker process needs to open the run."""
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
