"""Reach of the cluster: whether it answers, and since when it does not.

One judgement a step, however many calls a step makes.

Some of a cluster may answer while the rest is gone: a dashboard tells of jobs whose raylet is dead. A cluster that
left anything unanswered in a step counts as out of reach in that step.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from service.control.launcher.launcher import LauncherUnavailable

REPORT_AFTER_S = 3.0
"""A cluster that is slow for a moment is no news to its jobs."""
REPORT_INTERVAL_S = 10.0
"""Shortest interval between changes of the reported reason, and between lines of the log about it."""
log = structlog.get_logger(__name__)


class Reach:
    """The controller's knowledge of that."""

    def __init__(
        self, clock: Callable[[], float] = time.time, on_silence: Callable[[], None] = lambda: None
    ) -> None:
        """`on_silence` is called when the cluster leaves something unanswered for the first time since it answered."""
        self._clock, self._on_silence = clock, on_silence
        self._since: float | None = None
        self._why, self._why_at = "", 0.0
        self._logged_at = -float("inf")
        self._is_logged = False
        self.answers = True
        """Whether it has answered all that this step has asked so far."""
        self.runs_nothing = False
        """Whether what jobs run on is known to be dead."""

    @property
    def since(self) -> float | None:
        """Time at which the first step began that it left unanswered, of those without an answered one since."""
        return self._since

    def begin_step(self) -> None:
        self.answers = True

    def record_failure(self, error: Exception) -> None:
        """Takes the news that it did not answer."""
        self.answers = False
        self.runs_nothing = isinstance(error, LauncherUnavailable) and error.runs_nothing
        now = self._clock()
        if self._since is None:
            self._since = now
            self._on_silence()
        if not self._why or now - self._why_at >= REPORT_INTERVAL_S:
            self._why, self._why_at = str(error), now
        if not self._is_logged and now - self._logged_at >= REPORT_INTERVAL_S:
            self._is_logged, self._logged_at = True, now
            log.warning("the cluster cannot be reached; jobs are left as they are", error=str(error))

    def end_step(self) -> None:
        """Takes the end of a step in which something was asked."""
        if not self.answers or self._since is None:
            return
        if self._is_logged:
            log.info("the cluster answers again", after_s=round(self._clock() - self._since, 1))
        self._since, self._why, self._is_logged, self.runs_nothing = None, "", False, False

    def words(self, reported_since: float | None = None) -> str:
        """Since when it is out of reach, and why; nothing while it answers, or has not been silent for long.

        `reported_since`: since when that was told before, perhaps by a control plane that is gone."""
        if self._since is None:
            return ""
        is_news = reported_since is not None or self._clock() - self._since >= REPORT_AFTER_S
        if not is_news and not self.runs_nothing:
            return ""
        return unreachable(reported_since or self._since, self._why)


def unreachable(since: float, why: str) -> str:
    return (
        f"the cluster cannot be reached since {datetime.fromtimestamp(since, UTC):%Y-%m-%dT%H:%M:%SZ}: {why}"
    )
