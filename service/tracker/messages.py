"""Messages to and from the tracker process: one line of JSON each."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from moe.spec.track import TrackerName


class _TrackerMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TrackedRun(_TrackerMessage):
    """A job, and one tracker that it is written to."""

    job_id: str
    tracker: TrackerName
    name: str
    labels: dict[str, str] = {}
    spec: dict[str, Any]
    """The job spec, with defaults."""
    fields: dict[str, Any] = {}
    """The tracker's fields of `track`."""
    layers: bool = False
    """Whether MoE layers are written one by one."""
    every_steps: int = 1
    """Distance of steps that are written, besides those with an evaluation."""
    folder: str
    """Local folder of all jobs' trackers."""
    server: str = ""
    """URL of the tracker's server, or of its database; empty for files in `folder`."""


class StepItem(_TrackerMessage):
    """Record of one step."""

    step: int
    attempt: int
    group: int
    time_s: float
    """Unix time of the record."""
    late: bool = False
    """Whether it arrived after a newer worker group had begun, which has not recorded this step."""
    data: str
    """JSON text, as stored."""


class RunEnd(_TrackerMessage):
    """End of a job, which may be resumed later unless it succeeded."""

    outcome: Literal["succeeded", "failed", "cancelled"]
    reason: str
    step: int
    time_s: float
    """Unix time of the end, which identifies it."""
    scores: dict[str, float] = {}
    """Scores of the evaluation report, and the best score."""


class TrackerOrder(_TrackerMessage):
    """A line of standard input. The process exits at end of file."""

    job_id: str
    tracker: TrackerName
    open: TrackedRun | None = None
    steps: tuple[StepItem, ...] = ()
    system: dict[str, float] = {}
    """Present use of the devices; belongs to the last of `steps`."""
    waiting: bool = False
    """Whether the job holds no workers."""
    end: RunEnd | None = None
    through: int = 0
    """Event up to which this order carries the job's records; confirmed by `written`."""
    close: bool = False
    """Forget the run without ending it."""


class TrackerReply(_TrackerMessage):
    """A line of standard output."""

    kind: Literal["opened", "written", "trouble", "note"]
    """`trouble`: orders are left out until the run is opened again. While it cannot be opened, that is repeated."""
    job_id: str
    tracker: TrackerName
    place: str = ""
    """URL or folder of the run, in a reply of kind `opened`."""
    last_step: int | None = None
    """Last step that the tracker has, in a reply of kind `opened`; None if it has none."""
    through: int = 0
    words: str = ""
