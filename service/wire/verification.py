"""Verification of a checkpoint, as the control plane answers it."""

from dataclasses import dataclass

from moe.records import JsonRecord


@dataclass(frozen=True)
class CheckpointFault(JsonRecord):
    """A file of a checkpoint that breaks a rule."""

    code: str
    """`missing`, `corrupt` or `unreadable`."""
    path: str
    """Path in the job's storage."""
    rule: str
    remedy: str
    value: int | None = None
    """The file's bytes, if they are wrong."""

    def __str__(self) -> str:
        return f"{self.path} {self.rule}; {self.remedy}"


@dataclass(frozen=True)
class CheckpointVerification(JsonRecord):
    """Comparison of a checkpoint's files with the sizes and checksums in its marker."""

    name: str
    step: int
    num_files: int
    """Files that were compared."""
    num_bytes: int
    """Bytes that were read."""
    seconds: float
    faults: tuple[CheckpointFault, ...] = ()

    @property
    def is_intact(self) -> bool:
        return not self.faults
