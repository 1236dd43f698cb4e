"""Decisions about a job on the cluster: what the controller does next."""

from dataclasses import dataclass
from typing import Literal

from service.wire.states import State


@dataclass(frozen=True)
class Wait:
    """Do nothing now."""


@dataclass(frozen=True)
class Submit:
    """Submit the due attempt to the cluster; idempotent through its submission id."""


@dataclass(frozen=True)
class NoteSubmission:
    """The attempt is already on the cluster: a control plane died before recording it."""


@dataclass(frozen=True)
class NoteUnseen:
    """The cluster does not know the submission; start the grace period."""


@dataclass(frozen=True)
class NoteSeen:
    """The submission has reappeared."""


@dataclass(frozen=True)
class NoteConfirmation:
    """The cluster knows the recovered attempt: the job is now like any other."""


@dataclass(frozen=True)
class NoteUnreachable:
    """Set the reason to an unreachable cluster; leave the run alone."""

    reason: str


@dataclass(frozen=True)
class NoteReachable:
    """Clear that reason: the cluster answers again."""

    reason: str


@dataclass(frozen=True)
class Move:
    """Change the job's state."""

    state: State
    reason: str


@dataclass(frozen=True)
class Explain:
    """Change the job's reason, not its state."""

    reason: str


@dataclass(frozen=True)
class Stop:
    """Stop the driver by force; the outcome is observed later."""

    reason: str
    kills: bool = False
    """Also send SIGKILL to the driver if it is on this machine."""


@dataclass(frozen=True)
class Retry:
    """The attempt is over; start another `after_s` from now."""

    reason: str
    after_s: float
    cause: str
    """Cause of the attempt's end, without the remedy."""
    counts_as: Literal["failure", "setback", "lost_start"] | None = "failure"
    """`setback`: cluster lost after the workers had begun; `lost_start`: before. None: the driver's node was
    preempted."""
    kind: str = ""


@dataclass(frozen=True)
class AskResize:
    """Ask the run to commit a checkpoint and end, for another number of workers."""

    reason: str


@dataclass(frozen=True)
class Resize:
    """The attempt ended for a resize; start another at once."""

    reason: str


@dataclass(frozen=True)
class End:
    """The attempt is over, and the job ends or pauses."""

    state: State
    reason: str
    stops: bool = False
    """Also stop the submission, in case it was only unseen."""


Decision = (
    Wait
    | Submit
    | NoteSubmission
    | NoteUnseen
    | NoteSeen
    | NoteConfirmation
    | NoteUnreachable
    | NoteReachable
    | Move
    | Explain
    | Stop
    | Retry
    | AskResize
    | Resize
    | End
)
