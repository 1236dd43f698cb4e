"""Messages of a run to the control plane (`Record`) and on to clients (`Event`)."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

RECORD_VERSION = 1
"""Format version of a line on storage."""
MAX_BATCH_RECORDS = 1000
MAX_BATCH_BYTES = 4_000_000
"""Largest request body; a sender splits larger batches."""

EventKind = Literal["state", "plan", "metric", "checkpoint", "log"]
RecordKind = Literal[
    "metric", "checkpoint", "checkpoint_failed", "log", "started", "resumed", "finishing", "waiting", "recovering",
    "phase", "plan",
]  # fmt: skip
Request = Literal["pause", "cancel"]
Writer = Annotated[str, Field(pattern=r"^(driver|group-(0|[1-9][0-9]{0,5}))$")]
"""Owner of a sequence of records: `driver`, or `group-3`, rank 0 of the attempt's fourth worker group."""


RecordTime = Annotated[AwareDatetime, Field(ge=datetime(2000, 1, 1, tzinfo=UTC), lt=datetime(2200, 1, 1, tzinfo=UTC))]
"""Time by the recorder's clock, in years that convert to every time zone."""


class _EventMessage(BaseModel):
    # Sender and receiver may be of different releases: unknown fields are ignored.
    model_config = ConfigDict(frozen=True, extra="ignore")


class Event(_EventMessage):
    """An event of a job as clients see it."""

    id: int = Field(ge=1)
    """Number in the job's sequence over all kinds, from 1, without gaps."""
    kind: EventKind
    time: AwareDatetime
    attempt: int | None
    """None for an event outside an attempt."""
    actor: str
    """`controller`, `user:<owner>`, or the writer of a record, such as `group-0`."""
    data: dict[str, Any]
    superseded: Literal["run", "step"] | None = None
    """For a metric that arrived after a newer attempt or worker group had begun. `step`: the newer one recorded this
    step too."""


class Record(_EventMessage):
    """One message of a worker group or driver.

    kind        data
    metric      a StepRecord
    checkpoint  a CheckpointRecord
    checkpoint_failed  {"step": int, "reason": str}: given up until the next checkpoint
    log         {"level": str, "message": str, ...}
    started     {"group": int, "workers": [{"rank", "node", "device"}, ...]}: comes first
    resumed     {"group": int, "num_workers": int, "step": int, "checkpoint": str | None}: what was loaded
    finishing   {"step": int, "activity": "saving" | "evaluating"}: what follows the last step, as it begins
    waiting     {"reason": str}: the driver's workers have not been placed for a while
    recovering  {"reason": str, "kind": FailureKind, "preempted": bool, "at_start": bool}: the worker group died and
                another starts; a preempted node and a death at the start count as no failure
    phase       {"name": "imports" | "worker_group" | "data" | "trials" | "model" | "first_step", "seconds": float}
    plan        {"plan": Plan}: chosen by trials, replaces the plan that was shown
    """

    kind: RecordKind
    time: RecordTime
    data: dict[str, Any]


class SealedRecord(Record):
    """One line of `storage/metrics/a<attempt>.g<group>/segment-*.jsonl` (`a<attempt>.driver` for the driver), with
    the sequence number by which the control plane skips delivered records."""

    version: int = RECORD_VERSION
    seq: int = Field(ge=0)


class RecordBatch(_EventMessage):
    """Consecutive records of one writer, posted to `/internal/v1/jobs/{id}/records`. An empty batch is a heartbeat,
    and fetches the request."""

    attempt: int = Field(ge=1)
    writer: Writer
    first_seq: int = Field(ge=0)
    """Sequence number of the first record; a writer's sequence starts at 0."""
    records: tuple[Record, ...] = Field(max_length=MAX_BATCH_RECORDS)
    run: dict[str, Any] | None = None
    """A `RunStatus`, from the driver every few seconds. Validated separately, so that a bad one loses no records."""
    driver_silent_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """From the first worker: seconds since the driver last answered it."""


class RecordAnswer(_EventMessage):
    """Acknowledges records below `next_seq`, with the request to the run. Also the body of the 409 for a gap: the
    sender continues from `next_seq`."""

    next_seq: int
    request: Request | None = None


def rfc3339(time: datetime) -> str:
    """`2026-01-31T12:00:00.123456Z`: UTC, always with microseconds, so that text order is time order."""
    return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
