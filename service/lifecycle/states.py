"""The states of a job, and the changes between them that are allowed."""

from enum import StrEnum


class State(StrEnum):
    QUEUED = "queued"
    """Waits for room on the cluster, or for a larger cluster."""
    STARTING = "starting"
    """An attempt was launched; its workers are on their way."""
    RUNNING = "running"
    RECOVERING = "recovering"
    """A worker group or driver died; another is on its way."""
    PAUSING = "pausing"
    """Asked to pause; commits a checkpoint at the next step boundary."""
    PAUSED = "paused"
    """Holds nothing of the cluster; `resume` goes on from the last committed checkpoint."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})

TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.STARTING, State.PAUSED, State.FAILED, State.CANCELLED}),
    State.STARTING: _ENDS | {State.RUNNING, State.RECOVERING, State.PAUSING, State.PAUSED},
    State.RUNNING: _ENDS | {State.RECOVERING, State.PAUSING, State.PAUSED},
    State.RECOVERING: _ENDS | {State.RUNNING, State.PAUSING, State.PAUSED},
    State.PAUSING: _ENDS | {State.PAUSED},
    State.PAUSED: frozenset({State.QUEUED, State.CANCELLED}),
    **{end: frozenset() for end in _ENDS},
}
"""What may follow each state. Nothing follows an end."""

TERMINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)
ACTIVE = frozenset({State.STARTING, State.RUNNING, State.RECOVERING, State.PAUSING})
"""States in which something of the job may be on the cluster: those that the controller observes."""


def sources(to: State) -> frozenset[State]:
    """The states from which `to` may be entered."""
    return frozenset(state for state, following in TRANSITIONS.items() if to in following)
