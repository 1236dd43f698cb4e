"""Plans of users' modules, one at a time, in a process that imports them."""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from moe.plan import Cluster, Plan
from moe.plan.plan import MadeFor
from moe.plan.plan_file import made_for
from moe.spec import JobSpec, SpecError
from service.control.errors import Unavailable
from service.planner.planning_process import PlanningCancellation, PlanningLimits, ask
from service.planner.request import JobRequest

BEING_PLANNED = "capturing and planning its module"
MAX_CACHED = 64
MAX_WAITING = 8
"""Maximum number of unfinished plans, since every caller occupies a request thread."""
CACHE_S = 60.0
"""Time for which a plan or error is reused; later, the code may have changed."""
log = structlog.get_logger(__name__)


@dataclass
class _PendingPlan:
    future: "Future[Plan]"
    expires_at: float = math.inf

    def note_done(self, _: object) -> None:
        self.expires_at = time.monotonic() + CACHE_S


class ModulePlans:
    """Plans of users' modules. Thread-safe. `wake` is called when a plan is finished."""

    def __init__(
        self, allowed_code: tuple[str, ...], timeout_s: float, memory_bytes: int, wake: Callable[[], None]
    ) -> None:
        self._allowed_code, self._wake = allowed_code, wake
        self._stop_event = threading.Event()
        self._limits = PlanningLimits(timeout_s, memory_bytes, self._stop_event)
        self._pending: OrderedDict[MadeFor, _PendingPlan] = OrderedDict()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "module-plans")

    def wait_for_plan(self, spec: JobSpec, cluster: Cluster) -> Plan:
        """Plan on all devices of a cluster; blocks. Raises SpecError, and Unavailable while too many callers wait."""
        try:
            return self._ask(spec, cluster).result()
        except PlanningCancellation as error:
            raise Unavailable(str(error)) from None

    def begin(self, spec: JobSpec, cluster: Cluster) -> Plan | None:
        """As `wait_for_plan`, without blocking: None until the plan is finished."""
        future = self._ask(spec, cluster)
        return future.result() if future.done() else None

    def close(self) -> None:
        """Cancel unfinished plans."""
        self._stop_event.set()
        self._worker.shutdown(cancel_futures=True)

    def _ask(self, spec: JobSpec, cluster: Cluster) -> "Future[Plan]":
        key = made_for(spec, cluster)
        with self._lock:
            plan_request = self._pending.get(key)
            if plan_request is None or time.monotonic() > plan_request.expires_at:
                if sum(not request.future.done() for request in self._pending.values()) >= MAX_WAITING:
                    raise Unavailable("other modules are being planned; try again in a minute")
                plan_request = _PendingPlan(self._worker.submit(self._plan, spec, cluster))
                plan_request.future.add_done_callback(plan_request.note_done)
                plan_request.future.add_done_callback(lambda _: self._wake())
            self._pending[key] = plan_request
            self._pending.move_to_end(key)
            finished = [request_key for request_key, request in self._pending.items() if request.future.done()]
            for oldest in finished[:-MAX_CACHED]:
                del self._pending[oldest]
            return plan_request.future

    def _plan(self, spec: JobSpec, cluster: Cluster) -> Plan:
        began = time.monotonic()
        try:
            answer = ask(JobRequest(spec=spec, cluster=cluster, allowed_code=self._allowed_code), self._limits)
            plan = Plan.model_validate(answer.plan)
        except SpecError as error:
            log.info("planning a module failed", why=str(error), seconds=round(time.monotonic() - began, 1))
            raise
        log.info("planned a module", workers=plan.num_workers, seconds=round(time.monotonic() - began, 1))
        return plan
