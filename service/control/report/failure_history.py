"""Failures and lost clusters of a job since its last progress, ordered by when they happened.

Progress is a checkpoint beyond any earlier step. It forgives everything before it and nothing after it, even if it
arrives late.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe.spec import RetrySpec

Moment = tuple[int, int]
"""(attempt, microseconds by the run's clock)."""
END = 2**62
"""Time of an attempt's end: after everything else in the attempt."""
MAX_STORED_FAILURES = 100
"""Maximum number of failures whose times are stored, the newest ones; older ones are only counted."""


class FailureHistory(BaseModel):
    # Older and newer releases may have stored other fields.
    model_config = ConfigDict(frozen=True, extra="ignore")

    progress_at: Moment = (0, 0)
    failures: tuple[Moment, ...] = ()
    kinds: tuple[str, ...] = ()
    """Kinds of `failures`; "" if unknown."""
    num_older: int = 0
    """Number of earlier failures."""
    older_kinds: dict[str, int] = Field(default_factory=dict)
    """Earlier failures by kind, where known."""
    setbacks: tuple[int, ...] = ()
    """Attempts lost with their cluster after their workers had begun."""
    lost_starts: tuple[int, ...] = ()
    """Attempts lost with their cluster before their workers had begun."""

    @property
    def num_failures(self) -> int:
        return self.num_older + len(self.failures)

    def num_of(self, kind: str) -> int:
        """Failures of one kind."""
        return self._kinds().count(kind) + self.older_kinds.get(kind, 0)

    def num_sharing(self, retry: RetrySpec) -> int:
        """Failures of kinds without a limit of their own."""
        limited_kinds = [kind for kind in retry.kinds if retry.own_limit(kind) is not None]
        return self.num_failures - sum(self.num_of(kind) for kind in limited_kinds)

    def num_left(self, retry: RetrySpec, kind: str) -> int:
        """Remaining allowed failures of a kind."""
        limit = retry.own_limit(kind)
        num_remaining = retry.max_failures - self.num_sharing(retry) if limit is None else limit - self.num_of(kind)
        return max(0, num_remaining)

    def _kinds(self) -> tuple[str, ...]:
        # An earlier release stored failures without their kinds.
        return self.kinds if len(self.kinds) == len(self.failures) else ("",) * len(self.failures)

    def after_failure(self, moment: Moment, kind: str = "") -> "FailureHistory":
        """Add a failure reported now, unless it is already forgiven."""
        if moment < self.progress_at:
            return self
        all_failures = sorted((*zip(self.failures, self._kinds(), strict=True), (moment, kind)))
        older, older_kinds = all_failures[:-MAX_STORED_FAILURES], Counter(self.older_kinds)
        older_kinds.update(kind for _, kind in older if kind)
        return self._with(all_failures[-MAX_STORED_FAILURES:], self.num_older + len(older), older_kinds)

    def _with(
        self, failures: Sequence[tuple[Moment, str]], num_older: int, older_kinds: Mapping[str, int]
    ) -> "FailureHistory":
        moments, kinds = tuple(moment for moment, _ in failures), tuple(kind for _, kind in failures)
        return self.model_copy(
            update={"failures": moments, "kinds": kinds, "num_older": num_older, "older_kinds": dict(older_kinds)}
        )

    def with_failures_of(self, source: "FailureHistory", attempt: int) -> "FailureHistory":
        """Add one attempt's failures from `source`, another history of the job."""
        losses = self
        for moment, kind in zip(source.failures, source._kinds(), strict=True):
            losses = losses.after_failure(moment, kind) if moment[0] == attempt else losses
        return losses

    def after_setback(self, attempt: int) -> "FailureHistory":
        """Add an attempt lost with its cluster after its workers had begun."""
        return self.model_copy(update={"setbacks": (*self.setbacks, attempt)})

    def after_lost_start(self, attempt: int) -> "FailureHistory":
        """Add an attempt lost with its cluster before its workers had begun."""
        return self.model_copy(update={"lost_starts": (*self.lost_starts, attempt)})

    def after_progress(self, moment: Moment) -> "FailureHistory":
        """Add progress reported now, possibly late."""
        if moment < self.progress_at:
            return self
        forgiven = not self.failures or self.failures[0] <= moment
        failures = [pair for pair in zip(self.failures, self._kinds(), strict=True) if pair[0] > moment]
        remaining = {
            "setbacks": tuple(attempt for attempt in self.setbacks if attempt >= moment[0]),
            "lost_starts": tuple(attempt for attempt in self.lost_starts if attempt >= moment[0]),
        }
        history = self._with(failures, *((0, {}) if forgiven else (self.num_older, self.older_kinds)))
        return history.model_copy(update={"progress_at": moment, **remaining})


def read_failures(text: str | None, failures: int) -> FailureHistory:
    """Parse the stored history; for an earlier release's job, `failures` that any progress forgives."""
    try:
        return FailureHistory.model_validate_json(text) if text else FailureHistory(num_older=failures)
    except ValidationError:
        return FailureHistory(num_older=failures)
