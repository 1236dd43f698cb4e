"""A known fault of a cluster, as its keeper reports it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Trouble:
    """Reason not to call a cluster now."""

    reason: str
    runs_nothing: bool
    """Whether the processes that run jobs are dead, not only the API."""
