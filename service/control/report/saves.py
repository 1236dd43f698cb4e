"""Last committed and failed checkpoints of a job, as its run reports them."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from moe.records import CheckpointRecord
from moe.train.checkpoint.marker import Marker
from service.wire.events import Record, rfc3339


class _StoredRecord(BaseModel):
    # Older and newer releases may have stored other fields.
    model_config = ConfigDict(frozen=True, extra="ignore")


class CheckpointCommit(_StoredRecord):
    step: int
    time: datetime
    size_bytes: int | None = None


class CheckpointFailure(_StoredRecord):
    step: int
    time: datetime
    reason: str
    num_failed: int
    """Consecutive failed checkpoints up to this one."""


class Saves(_StoredRecord):
    """Last commit and last failure, for display. Storage decides what is committed."""

    committed: CheckpointCommit | None = None
    failed: CheckpointFailure | None = None
    failing: bool = False
    """Whether the last checkpoint failed."""

    def after(self, record: Record, step: int) -> "Saves":
        """Saves after a record of kind `checkpoint` or `checkpoint_failed`."""
        if record.kind == "checkpoint":
            size_bytes = CheckpointRecord.read(record.data).size_bytes
            checkpoint = CheckpointCommit(step=step, time=record.time, size_bytes=size_bytes)
            return self.model_copy(update={"committed": checkpoint, "failing": False})
        num_before = self.failed.num_failed if self.failed and self.failing else 0
        reason = str(record.data.get("reason", "no reason given"))
        failure = CheckpointFailure(step=step, time=record.time, reason=reason, num_failed=num_before + 1)
        return self.model_copy(update={"failed": failure, "failing": True})

    def trouble(self) -> str:
        """Addition to a running job's reason while checkpoints fail; else empty."""
        if self.failed is None or not self.failing:
            return ""
        failure, start = self.failed, "from the beginning"
        if self.committed is not None:
            start = f"from step {self.committed.step}"
        subject = f"the checkpoint of step {failure.step} failed"
        if failure.num_failed > 1:
            subject = f"the last {failure.num_failed} checkpoints failed, the one of step {failure.step} with"
        return f"{subject}{':' if failure.num_failed == 1 else ''} {failure.reason}; a restart would resume {start}"

    def view(self) -> dict[str, Any]:
        """Fields of a job's view for clients."""
        fields: dict[str, Any] = {"last_checkpoint": None, "last_failed_checkpoint": None}
        if (last := self.committed) is not None:
            fields["last_checkpoint"] = {**last.model_dump(), "time": rfc3339(last.time)}
        if (last_failed := self.failed) is not None:
            fields["last_failed_checkpoint"] = {**last_failed.model_dump(), "time": rfc3339(last_failed.time)}
        return {**fields, "checkpoints_failing": self.failing}


def saves_of_copy(copy: Marker, copied_at: datetime) -> Saves:
    """Saves of a job that starts from another's checkpoint, its own from `copied_at` on."""
    return Saves(committed=CheckpointCommit(step=copy.step, time=copied_at, size_bytes=copy.size_bytes))


def read_saves(text: str | None) -> Saves:
    """Parse the stored value; empty if in another release's form."""
    try:
        return Saves.model_validate_json(text) if text else Saves()
    except ValidationError:
        return Saves()
