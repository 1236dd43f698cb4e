"""Observation of an attempt on Kubernetes: a pure function from facts about its objects."""

from datetime import UTC, datetime

from service.control.launcher.kuberay.facts import AttemptFacts, Condition, EventFacts, RayJobFacts, WorkloadFacts
from service.control.launcher.kuberay.pod_trouble import PodTrouble, Severity, one_line, worst_trouble
from service.control.launcher.launcher import Observation
from service.control.launcher.ray_failure import parse_failure
from service.wire.launch import FENCED_EXIT_CODE

SILENCE_S = 30.0
"""Time after which the message mentions that a controller has not acted on an object."""
FRESH_S = 600.0
"""Age at which an event about a failed creation is outdated. Controllers repeat them at least every 5 minutes."""
_ENDED_JOBS = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
_HEAD_GONE = "Ray head pod not found"
"""Beginning of KubeRay's message about a RayJob whose head pod was deleted."""
_QUEUED_AGAIN = frozenset({"PodsReadyTimeout", "AdmissionCheck"})
"""Reasons of evictions after which Kueue queues a Workload again that has not run yet. If it has, the fence of its
attempt's folder ends the second driver."""
_NO_TROUBLE = Severity.STARTING


def observe(facts: AttemptFacts) -> Observation:
    """Observation of an attempt, with the reason why it waits, is in trouble, or ended."""
    job = facts.ray_job
    if job is None:
        return _observe_missing(facts)
    if job.is_deleting:
        return _observe_deletion(job, facts)
    if job.deployment_status == "ValidationFailed":
        reason = one_line(job.message) or "KubeRay gives no reason"
        return Observation(status="failed", refused=True, message=f"KubeRay refuses RayJob {job.name}: {reason}")
    if job.deployment_status in ("Complete", "Failed") or job.job_status in _ENDED_JOBS:
        return _observe_end(job, facts)
    if job.deployment_status in ("Suspending", "Suspended"):
        return _observe_suspension(job, facts)
    if job.job_status == "RUNNING":
        return Observation(status="running", waiting=_running_message(job, facts))
    is_queued = job.is_suspended and bool(job.queue) and _is_queued(facts.workload)
    return Observation(status="pending", waiting=_pending_message(job, facts), queued=is_queued)


def _observe_missing(facts: AttemptFacts) -> Observation:
    if not facts.was_seen:
        return Observation(status="unknown", message="it has no RayJob")
    return Observation(
        status="unknown", forgotten=not facts.pods, message=f"its RayJob was deleted{_remaining_pods(facts)}"
    )


def _observe_deletion(job: RayJobFacts, facts: AttemptFacts) -> Observation:
    message = f"RayJob {job.name} was deleted"
    return Observation(
        status="stopped",
        lost=True,
        released=not facts.pods,
        message=message,
        waiting=f"{message}{_remaining_pods(facts)}" if facts.pods else "",
    )


def _observe_suspension(job: RayJobFacts, facts: AttemptFacts) -> Observation:
    is_over = job.deployment_status == "Suspended" and not facts.pods
    if not job.queue:
        message = f"RayJob {job.name} was suspended"
        waiting = "" if is_over else f"{message}{_remaining_pods(facts)}"
        return Observation(status="stopped", lost=True, released=is_over, message=message, waiting=waiting)
    eviction = _eviction(facts.workload)
    if eviction is None or not eviction.is_true or eviction.reason in _QUEUED_AGAIN or _is_deactivated(facts.workload):
        return Observation(status="pending", waiting=_queue_message(job, facts), queued=_is_queued(facts.workload))
    message = f"Kueue evicted it: {_condition_text(eviction)}"
    waiting = "" if is_over else f"{message}{_remaining_pods(facts)}"
    return Observation(status="stopped", preempted=True, released=is_over, message=message, waiting=waiting)


def _observe_end(job: RayJobFacts, facts: AttemptFacts) -> Observation:
    if job.job_status == "SUCCEEDED" or (job.deployment_status == "Complete" and not job.job_status):
        return Observation(status="succeeded", message="its driver ended")
    failure = parse_failure(job.message)
    message = one_line(failure.message) or f"KubeRay gives no reason ({job.reason or job.deployment_status})"
    if job.reason == "SubmissionFailed":
        message = f"its driver could not be submitted: {message}"
    if job.job_status == "STOPPED":
        return Observation(status="stopped", message=message if failure.message else "its Ray job was stopped")
    trouble = worst_trouble(facts.pods, facts.events, include_past=True)
    head_trouble = worst_trouble([pod for pod in facts.pods if pod.is_head], facts.events, include_past=True)
    is_fenced = failure.exit_code == FENCED_EXIT_CODE
    if is_fenced:
        message = "its driver was started a second time, because the first was lost with its Ray head"
    if trouble is not None and trouble.severity >= Severity.CRASHED:
        message = f"{message}; {trouble.description}"
    eviction = _eviction(facts.workload)
    if eviction is not None and (is_fenced or not failure.output):
        message = f"{message}; Kueue evicted it: {_condition_text(eviction)}"
    lost_with_head = not failure.output and (
        _has_severity(head_trouble, Severity.LOST) or failure.message.startswith(_HEAD_GONE)
    )
    preempted_head = not failure.output and _has_severity(head_trouble, Severity.PREEMPTED)
    return Observation(
        status="failed",
        message=message,
        output="" if is_fenced else failure.output,
        preempted=failure.preempted or preempted_head or (eviction is not None and (is_fenced or not failure.output)),
        lost=is_fenced or lost_with_head,
    )


def _has_severity(trouble: PodTrouble | None, severity: Severity) -> bool:
    return trouble is not None and trouble.severity == severity


def _running_message(job: RayJobFacts, facts: AttemptFacts) -> str:
    eviction = _eviction(facts.workload)
    if eviction is not None and eviction.is_true:
        return f"Kueue evicts it: {_condition_text(eviction)}"
    if job.is_suspended:
        return f"RayJob {job.name} is being suspended"
    trouble = worst_trouble(facts.pods, facts.events)
    return "" if trouble is None else trouble.description


def _pending_message(job: RayJobFacts, facts: AttemptFacts) -> str:
    if job.is_suspended:
        return _queue_message(job, facts) if job.queue else f"RayJob {job.name} is suspended"
    if not job.deployment_status:
        return _operator_message(job, facts)
    trouble = worst_trouble(facts.pods, facts.events)
    if trouble is not None and trouble.severity > _NO_TROUBLE:
        return trouble.description
    if failure := _creation_failure(facts, any_age=not facts.pods):
        return failure
    if trouble is not None:
        num_ready = sum(pod.is_ready for pod in facts.pods)
        return f"{trouble.description}; {num_ready} of {len(facts.pods)} pods are ready"
    if facts.ray_cluster is None:
        return f"KubeRay is creating the Ray cluster of RayJob {job.name}"
    if facts.ray_cluster.state == "failed":
        return f"RayCluster {facts.ray_cluster.name} failed: {one_line(facts.ray_cluster.reason) or 'no reason given'}"
    if not facts.pods:
        return f"KubeRay is creating the pods of RayCluster {facts.ray_cluster.name}"
    return "its Ray cluster is up; its driver is being started"


def _operator_message(job: RayJobFacts, facts: AttemptFacts) -> str:
    if job.created_s is None or facts.now_s - job.created_s < SILENCE_S:
        return f"waiting for the KubeRay operator to see RayJob {job.name}"
    return (
        f"no KubeRay operator has acted on RayJob {job.name} since {_time(job.created_s)}: "
        "is one running, and does it watch this namespace?"
    )


def _queue_message(job: RayJobFacts, facts: AttemptFacts) -> str:
    workload, queue = facts.workload, job.queue
    if workload is None:
        if job.created_s is None or facts.now_s - job.created_s < SILENCE_S:
            return f"waiting for Kueue to put it in queue {queue}"
        return (
            f"Kueue has not put RayJob {job.name} in queue {queue} since {_time(job.created_s)}: "
            "is Kueue running, with ray.io/rayjob among its integrations?"
        )
    reserved = workload.conditions.get("QuotaReserved", Condition())
    eviction = _eviction(workload)
    if _is_deactivated(workload):
        cause = f": {_condition_text(eviction)}" if eviction is not None else ""
        return f"its Workload {workload.name} was deactivated{cause}"
    if workload.conditions.get("Admitted", Condition()).is_true:
        return f"queue {queue} has admitted it; its Ray cluster is being started"
    if reserved.is_true:
        checks = (
            f"{name} is {check.status or 'unknown'}" + (f" ({one_line(check.message)})" if check.message else "")
            for name, check in sorted(workload.checks.items())
            if check.status != "Ready"
        )
        return one_line(f"queue {queue} has quota for it; its admission checks: {', '.join(checks) or 'not started'}")
    again = f"; evicted before: {_condition_text(eviction)}" if eviction is not None and eviction.is_true else ""
    if reserved.reason == "Inadmissible":
        return f"queue {queue} does not admit it: {one_line(reserved.message) or 'no reason given'}{again}"
    message = one_line(reserved.message)
    return f"waiting in queue {queue}" + (f": {message}" if message else "") + again


def _creation_failure(facts: AttemptFacts, any_age: bool) -> str:
    """Reason why the operator could not create pods or a Ray cluster; "" if it could."""
    cluster = facts.ray_cluster
    failure = cluster.conditions.get("ReplicaFailure", Condition()) if cluster is not None else Condition()
    message = failure.message if failure.is_true else ""
    if not message:
        events = [event for event in facts.events if _is_failed_creation(event)]
        newest = max(events, key=lambda event: event.last_s, default=None)
        if newest is None or (not any_age and facts.now_s - newest.last_s > FRESH_S):
            return ""
        message = newest.message or newest.reason
    if "exceeded quota" in message:
        return f"the namespace's quota is exceeded: {one_line(message)}"
    if "admission webhook" in message or "denied the request" in message:
        return f"an admission webhook denies its pods: {one_line(message)}"
    return f"its pods cannot be created: {one_line(message)}"


def _is_failed_creation(event: EventFacts) -> bool:
    is_ours = event.kind in ("RayJob", "RayCluster")
    return is_ours and event.is_warning and event.reason.startswith(("FailedCreate", "FailedToCreate"))


def _eviction(workload: WorkloadFacts | None) -> Condition | None:
    """The latest eviction, which is over if its status is False; None if there was none."""
    if workload is None or (evicted := workload.conditions.get("Evicted")) is None:
        return None
    preempted = workload.conditions.get("Preempted", Condition())
    if evicted.is_true and preempted.is_true and preempted.message:
        return Condition(evicted.status, evicted.reason, preempted.message)
    return evicted


def _is_queued(workload: WorkloadFacts | None) -> bool:
    """Whether Kueue is still to admit it, as opposed to never, or once its admission checks are done."""
    if workload is None:
        return False
    reserved = workload.conditions.get("QuotaReserved", Condition())
    return workload.is_active and not reserved.is_true and reserved.reason != "Inadmissible"


def _is_deactivated(workload: WorkloadFacts | None) -> bool:
    return workload is not None and not workload.is_active


def _condition_text(condition: Condition) -> str:
    reason = condition.reason or "no reason given"
    return f"{reason}: {one_line(condition.message)}" if condition.message.strip() else reason


def _remaining_pods(facts: AttemptFacts) -> str:
    count = len(facts.pods)
    if not count:
        return ""
    nodes = sorted({pod.node for pod in facts.pods if pod.node})
    location = f" on {', '.join(nodes[:3])}" + (" and others" if len(nodes) > 3 else "") if nodes else ""
    return f"; {count} of its pods {'is' if count == 1 else 'are'} still ending{location}"


def _time(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
