"""States of a job and the allowed transitions."""

from enum import StrEnum


class State(StrEnum):
    QUEUED = "queued"
    """Waits for free resources on the cluster, or for a larger cluster."""
    STARTING = "starting"
    """An attempt was launched; its workers are starting."""
    RUNNING = "running"
    RECOVERING = "recovering"
    """A worker group or driver died; another is starting."""
    PAUSING = "pausing"
    """Asked to pause; commits a checkpoint at the next step boundary."""
    PAUSED = "paused"
    """Holds no cluster resources; `resume` continues from the last committed checkpoint."""
    SUCCEEDED = "succeeded"
    """The only final state that cannot be resumed."""
    FAILED = "failed"
    """Holds no cluster resources; `resume` continues from its last checkpoint, if any."""
    CANCELLED = "cancelled"
    """As `failed`."""
    DELETING = "deleting"
    """Its files and rows are being removed; requests are refused."""


ENDED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})
"""States of a job that continues only if somebody resumes it."""

TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.STARTING, State.PAUSED, State.FAILED, State.CANCELLED}),
    State.STARTING: ENDED | {State.RUNNING, State.RECOVERING, State.PAUSING, State.PAUSED},
    State.RUNNING: ENDED | {State.RECOVERING, State.PAUSING, State.PAUSED},
    State.RECOVERING: ENDED | {State.RUNNING, State.PAUSING, State.PAUSED},
    State.PAUSING: ENDED | {State.PAUSED},
    State.PAUSED: frozenset({State.QUEUED, State.CANCELLED, State.DELETING}),
    State.FAILED: frozenset({State.QUEUED, State.DELETING}),
    State.CANCELLED: frozenset({State.QUEUED, State.DELETING}),
    State.SUCCEEDED: frozenset({State.DELETING}),
    State.DELETING: frozenset(),
}
"""Allowed next states of each state."""


RESUMABLE = frozenset({State.PAUSED, State.FAILED, State.CANCELLED})
"""States from which `resume` queues a job again."""
OVER = ENDED | {State.DELETING}
"""States of a job that has ended or is being deleted."""
WAITS = "waiting for its turn"
"""Reason of a queued job without a more specific one."""
STUCK = "cannot be deleted yet: "
"""Prefix of the reason of a deletion that needs help."""
ACTIVE = frozenset({State.STARTING, State.RUNNING, State.RECOVERING, State.PAUSING})
"""States that the controller observes: the cluster may run something."""


def sources(target: State) -> frozenset[State]:
    """States from which `target` may be entered."""
    return frozenset(state for state, following in TRANSITIONS.items() if target in following)
