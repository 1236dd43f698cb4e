"""States of a sweep."""

from enum import StrEnum


class SweepState(StrEnum):
    RUNNING = "running"
    """Members are to start, run, or be compared."""
    PAUSED = "paused"
    """No member is started or chosen, and those that ran have paused or are about to."""
    SUCCEEDED = "succeeded"
    """All members are over, and at least one succeeded."""
    FAILED = "failed"
    """All members are over, and none succeeded; or a rung had nothing to choose by."""
    CANCELLED = "cancelled"
    DELETING = "deleting"
    """Its members are being deleted."""
    DELETED = "deleted"
    """Only this row remains, for its idempotency key."""


ENDED_SWEEP = frozenset({SweepState.SUCCEEDED, SweepState.FAILED, SweepState.CANCELLED})
UNFINISHED_SWEEP = frozenset({SweepState.RUNNING, SweepState.PAUSED})
MEMBER_DELETED = "deleted"
"""In place of the state of a member whose job is gone."""
