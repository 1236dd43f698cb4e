"""Trouble with a cluster, as whoever tends it tells whoever asks it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Trouble:
    """Reason why a cluster need not be asked now."""

    words: str
    runs_nothing: bool
    """Whether what jobs run on is dead, and not only what answers for it."""
