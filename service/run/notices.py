"""Notices of Ray Train's controller to the driver: a worker group died, and why.

The callback travels to the workers with the run's settings, so that it holds no more than a path; a line in a local
file cannot fail on the network, nor take the controller down.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.train import UserCallback

MAX_REASON = 500


class GroupNotices(UserCallback):
    """Notes each death of a worker group in a file. Never raises: an error here would end the run."""

    def __init__(self, path: str) -> None:
        self._path = path

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        with suppress(Exception):
            line = json.dumps({"reason": reason(worker_exceptions)})
            # A worker that ends clears away folders that it finds empty.
            Path(self._path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self._path, "a") as file:
                file.write(line + "\n")


def reason(errors: dict[int, Exception]) -> str:
    """Reason why a group died, in a sentence: a lost process says more than the collectives that it broke."""
    said = {rank: _in_words(error) for rank, error in errors.items()}
    lost = {rank: words for rank, words in said.items() if words is None}
    if lost:
        ranks = ", ".join(str(rank) for rank in sorted(lost))
        return f"rank {ranks} was lost: its process died"
    rank, words = min(said.items())
    return f"rank {rank} failed: {words}"[:MAX_REASON]


def read_notices(path: Path) -> list[str]:
    """The reasons of all deaths so far, in order."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [str(json.loads(line)["reason"]) for line in lines]


def _in_words(error: Exception) -> str | None:
    """None for a process that is gone."""
    # Ray wraps what happened: a dead actor in a failed health check, a worker's exception in its traceback.
    cause = getattr(error, "health_check_failure", None) or getattr(error, "_base_exc", None) or error
    if any(kind.__name__ == "RayActorError" for kind in type(cause).__mro__):
        return None
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0] if text else 'no message'}"
