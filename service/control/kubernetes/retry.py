"""Policy of repeated requests."""

from dataclasses import dataclass

from service.control.kubernetes.errors import Conflict, KubernetesError, Unavailable


@dataclass(frozen=True)
class Backoff:
    """Delays that double, with jitter."""

    first_s: float = 0.2
    longest_s: float = 10.0

    def delay_s(self, attempt: int, jitter: float) -> float:
        """Delay after an attempt, counted from 0; `jitter` is uniform in [0, 1) and takes up to half of it."""
        return min(self.longest_s, self.first_s * 2.0 ** min(attempt, 30)) * (1.0 - 0.5 * jitter)


@dataclass(frozen=True)
class RetryPolicy:
    """Limits of the attempts of one request."""

    attempts: int = 5
    patience_s: float = 20.0
    """Longest time from the first attempt to the start of the last."""
    backoff: Backoff = Backoff(longest_s=5.0)

    def delay_s(self, error: KubernetesError, attempt: int, elapsed_s: float, jitter: float) -> float | None:
        """Delay before the next attempt; None: give up. `attempt` counts from 0.

        Unavailable is repeated, since every request of this package may be; so is a Conflict of versions, but not one
        over fields of other managers. A delay that the server asks for is kept, unless patience ends before.
        """
        if attempt + 1 >= self.attempts or not _may_pass(error):
            return None
        delay_s = self.backoff.delay_s(attempt, jitter)
        if isinstance(error, Unavailable) and error.retry_after_s is not None:
            delay_s = max(delay_s, error.retry_after_s)
        return delay_s if elapsed_s + delay_s <= self.patience_s else None


def _may_pass(error: KubernetesError) -> bool:
    if isinstance(error, Conflict):
        return error.reason == "Conflict" and "the object has been modified" in str(error)
    return isinstance(error, Unavailable)
