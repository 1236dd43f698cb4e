"""Copies the last output of a dead driver into its job's log."""

from datetime import UTC, datetime

from moe.storage.folder import Folder
from service.wire.events import rfc3339
from service.wire.segments import SegmentFolder, WriterFolder

NAME = "segment-99999999.log"
"""Sorts after all sealed segments; constant, so that writing is idempotent."""
COMPARED_BYTES = 256_000
"""Bytes of the driver's own log that are searched for known lines."""


def store_last_output(storage: Folder, attempt: int, output: str) -> None:
    """Add the cluster's copy of a dead driver's output to its log, without known lines. Raises OSError."""
    logs = SegmentFolder(storage, "logs")
    writer = WriterFolder(attempt, -1, 0, f"a{attempt}.driver")
    segments = logs.segments(writer)
    if segments and segments[-1].path.endswith(NAME):
        return
    known_output = b""
    for segment in reversed(segments):
        if len(known_output) >= COMPARED_BYTES:
            break
        known_output = logs.read(segment, max(0, segment.num_bytes - COMPARED_BYTES), segment.num_bytes) + known_output
    known_lines = {_without_head(line) for line in known_output.decode(errors="replace").splitlines()}
    new_lines = [line for line in output.splitlines() if line.strip() and line.rstrip() not in known_lines]
    if new_lines:
        time_text = rfc3339(datetime.now(UTC))
        text = "".join(f"{time_text} {'err':<7} {line}\n" for line in new_lines)
        storage.write(f"logs/{writer.name}/{NAME}", text.encode(errors="replace"))


def _without_head(line: str) -> str:
    """A log line without its time and level."""
    parts = line.split(" ", 1)
    return parts[1][8:].rstrip() if len(parts) > 1 else line
