"""Batches of the example's recommender, which from some step on wait for a file lock, so that a run is still running
when a test disturbs it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recommender import data

GATE = "TEST_GATE"
"""Variable of the environment that names the file."""
FIRST_GATED = 12


def batch(seed: int, step: int) -> data.Batch:
    """The example's batch, once the gate is open."""
    if step >= FIRST_GATED:
        with Path(os.environ[GATE]).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    return data.batch(seed, step)


@contextmanager
def close_gate(gate: Path) -> Iterator[None]:
    """Keep the gate closed within the context."""
    with gate.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
