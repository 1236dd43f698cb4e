"""Corpora that jobs learn from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from moe.data.faults import Faults
from moe.data.locations import Location

CHECK_BYTES = 4 << 20
"""Maximum bytes that `check` reads of a user's corpus, beyond the first record of each file: a fraction of a second."""


class Corpus(ABC):
    """Source of training data. Its faults are SpecErrors that name the place in the spec."""

    @abstractmethod
    def check(self) -> tuple[str, ...]:
        """Check what can be seen quickly, without heavy imports; return warnings. Raises SpecError."""

    @property
    def user_files(self) -> Sequence[Location]:
        """The user's own files in this corpus."""
        return ()

    def records(self, faults: Faults) -> Iterator[object]:
        """Every usable record of the user's files, unprocessed; unusable ones are added to `faults`."""
        return iter(())

    @abstractmethod
    def fingerprint(self) -> str:
        """Value that changes when the corpus may have changed; the same on every machine with the same content."""

    @abstractmethod
    def facts(self) -> dict[str, object]:
        """Statistics of the records read so far; complete once the whole corpus has been read."""
