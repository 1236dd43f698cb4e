"""Notices of Ray Train's controller to the driver, whose process it runs in: a worker group died, and why.

The callback travels to the workers with the run's settings, so that it holds no more than a key.
"""

from collections import defaultdict
from contextlib import suppress
from typing import Any

from ray.train import UserCallback

MAX_REASON = 500
_reasons: defaultdict[str, list[str]] = defaultdict(list)
"""Reasons of deaths by the submission id of the attempt, in order."""


class GroupNotices(UserCallback):
    """Notes each death of a worker group. Never raises: an error here would end the run."""

    def __init__(self, submission_id: str) -> None:
        self._submission_id = submission_id

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        with suppress(Exception):
            _reasons[self._submission_id].append(reason(worker_exceptions))


def reason(errors: dict[int, Exception]) -> str:
    """Reason why a group died, in a sentence: a lost process says more than the collectives that it broke."""
    said = {rank: _in_words(error) for rank, error in errors.items()}
    lost = {rank: words for rank, words in said.items() if words is None}
    if lost:
        ranks = ", ".join(str(rank) for rank in sorted(lost))
        return f"rank {ranks} was lost: its process died"
    rank, words = min(said.items())
    return f"rank {rank} failed: {words}"[:MAX_REASON]


def read_notices(submission_id: str) -> list[str]:
    """The reasons of all deaths so far, in order."""
    return list(_reasons[submission_id])


def _in_words(error: Exception) -> str | None:
    """None for a process that is gone."""
    # Ray wraps what happened: a dead actor in a failed health check, a worker's exception in its traceback.
    cause = getattr(error, "health_check_failure", None) or getattr(error, "_base_exc", None) or error
    if any(kind.__name__ == "RayActorError" for kind in type(cause).__mro__):
        return None
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0] if text else 'no message'}"
