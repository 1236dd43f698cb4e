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
    """The one end that nothing resumes."""
    FAILED = "failed"
    """Holds nothing of the cluster; `resume` goes on from the last committed checkpoint, where there is one."""
    CANCELLED = "cancelled"
    """As `failed`."""
    DELETING = "deleting"
    """Its files and then its rows are taken away; nothing else can be asked of it any more."""


ENDED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})
"""States of a job that goes on no more, unless somebody resumes it."""

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
"""States that may follow each state."""


RESUMABLE = frozenset({State.PAUSED, State.FAILED, State.CANCELLED})
"""States that `resume` puts a job back into the queue from."""
OVER = ENDED | {State.DELETING}
"""States of a job that has ended or is on its way out: a stream has nothing more to tell of it."""
WAITS = "waits for its turn"
"""The reason of a job in the queue of which nothing else is to be told."""
STUCK = "cannot be deleted yet: "
"""Beginning of the reason of a deletion that goes on only once somebody has mended something."""
ACTIVE = frozenset({State.STARTING, State.RUNNING, State.RECOVERING, State.PAUSING})
"""States in which something of the job may be on the cluster: those that the controller observes."""


def sources(to: State) -> frozenset[State]:
    """The states from which `to` may be entered."""
    return frozenset(state for state, following in TRANSITIONS.items() if to in following)
