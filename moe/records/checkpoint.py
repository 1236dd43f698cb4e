"""Records of a committed checkpoint: the news of it, and its place on storage."""

from dataclasses import dataclass

from moe.records.json_record import JsonRecord


@dataclass(frozen=True)
class CheckpointRecord(JsonRecord):
    """News of a checkpoint, the data of a `checkpoint` event. None: of a release that had no such value."""

    step: int = 0
    """Steps finished in it."""
    name: str | None = None
    """Name of its folder under `checkpoints/`."""
    url: str | None = None
    size_bytes: int | None = None
    num_files: int | None = None
    stall_s: float | None = None
    """Seconds that training stood still for it."""
    write_s: float | None = None
    """Seconds until it was committed, beside training."""
    time: str | None = None
    """RFC 3339, UTC, by the clock of rank 0."""


@dataclass(frozen=True)
class StoredCheckpoint(JsonRecord):
    """A checkpoint of a job as its marker on storage says; without the marker's facts where there is a fault."""

    name: str
    step: int
    attempt: int
    group: int
    path: str
    fault: str | None
    created_at: str | None = None
    """RFC 3339, UTC."""
    num_workers: int | None = None
    num_files: int | None = None
    size_bytes: int | None = None
