"""Reachability of the cluster, judged once per step.

Parts of a cluster may answer while others are gone: a dashboard lists jobs whose raylet is dead. One unanswered query
makes the cluster unreachable in that step, unless the launcher says that it concerns a single submission.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from service.control.launcher.launcher import LauncherUnavailable

REPORT_AFTER_S = 3.0
"""Silence after which the reasons of jobs mention it: shorter delays are normal."""
REPORT_INTERVAL_S = 10.0
"""Shortest interval between changes of the reported reason, and between log lines."""
log = structlog.get_logger(__name__)


class Reachability:
    """Tracks whether the cluster answers, and when an outage began."""

    def __init__(self, clock: Callable[[], float] = time.time, on_silence: Callable[[], None] = lambda: None) -> None:
        """`on_silence` is called at the first unanswered query of a silent cluster."""
        self._clock, self._on_silence = clock, on_silence
        self._since: float | None = None
        self._cause, self._cause_at = "", 0.0
        self._logged_at = -float("inf")
        self._is_logged = False
        self._has_failed = self._is_silent = False
        self.answers = True
        """Whether further queries of this step may be answered."""
        self.runs_nothing = False
        """Whether the processes that run jobs are known to be dead."""

    @property
    def since(self) -> float | None:
        """Time of the first unanswered query since the last step without one; None while the cluster answers."""
        return self._since

    def begin_step(self) -> None:
        self.answers, self._has_failed = True, False

    def record_failure(self, error: Exception) -> None:
        """Record an unanswered query."""
        self._has_failed = True
        now_s = self._clock()
        self._since = self._since or now_s
        if not (isinstance(error, LauncherUnavailable) and error.is_of_one_request):
            self.answers = False
            self.runs_nothing = isinstance(error, LauncherUnavailable) and error.runs_nothing
            if not self._is_silent:
                self._is_silent = True
                self._on_silence()
        if not self._cause or now_s - self._cause_at >= REPORT_INTERVAL_S:
            self._cause, self._cause_at = str(error), now_s
        if not self._is_logged and now_s - self._logged_at >= REPORT_INTERVAL_S:
            self._is_logged, self._logged_at = True, now_s
            log.warning("cannot reach the cluster; jobs are left as they are", error=str(error))

    def end_step(self) -> None:
        """Finish a step in which the cluster was queried."""
        self._is_silent = not self.answers
        if self._has_failed or self._since is None:
            return
        if self._is_logged:
            log.info("the cluster responds again", after_s=round(self._clock() - self._since, 1))
        self._since, self._cause, self._is_logged, self.runs_nothing = None, "", False, False

    def describe_outage(self, reported_since: float | None = None) -> str:
        """Start and cause of the outage, for users; "" while the cluster answers or has only just become silent.
        `reported_since`: start of the outage as reported earlier."""
        if self._since is None:
            return ""
        is_reportable = reported_since is not None or self._clock() - self._since >= REPORT_AFTER_S
        if not is_reportable and not self.runs_nothing:
            return ""
        return describe_outage(reported_since or self._since, self._cause)


def describe_outage(since: float, cause: str) -> str:
    return f"the cluster has been unreachable since {datetime.fromtimestamp(since, UTC):%Y-%m-%dT%H:%M:%SZ}: {cause}"
