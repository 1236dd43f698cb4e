"""Records of committed checkpoints: as an event, and as stored."""

from dataclasses import dataclass

from moe.records.json_record import JsonRecord


@dataclass(frozen=True)
class CheckpointRecord(JsonRecord):
    """Committed checkpoint: the data of a `checkpoint` event. None: the writing release had no such field."""

    step: int = 0
    """Finished steps."""
    name: str | None = None
    """Folder name under `checkpoints/`."""
    url: str | None = None
    size_bytes: int | None = None
    num_files: int | None = None
    stall_s: float | None = None
    """Seconds that training was blocked."""
    write_s: float | None = None
    """Seconds of writing in the background, until the commit."""
    time: str | None = None
    """RFC 3339, UTC, by rank 0's clock."""


@dataclass(frozen=True)
class StoredCheckpoint(JsonRecord):
    """Stored checkpoint of a job, from its marker; without the optional fields if it has a fault."""

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
