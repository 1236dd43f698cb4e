"""Decisions about a job on the cluster: a pure function from observed facts to one decision.

An unreachable cluster changes nothing. A driver's status only says that it ended; `result.json` says how. A job frees
its resources only when its workers are gone. The run itself obeys a pause or cancel; its driver is killed only after
the deadline.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

from moe.spec import Backoff, RetrySpec
from service.control.launcher.launcher import Observation
from service.control.scheduling.decisions import (
    AskResize,
    Decision,
    End,
    Explain,
    Move,
    NoteConfirmation,
    NoteReachable,
    NoteSeen,
    NoteSubmission,
    NoteUnreachable,
    NoteUnseen,
    Resize,
    Retry,
    Stop,
    Submit,
    Wait,
)
from service.wire.launch import Result
from service.wire.states import State

MAX_SETBACKS = 5
"""Attempts lost with their cluster, without progress, at which the job is suspected of crashing it."""
MAX_LOST_STARTS = 20
"""As `MAX_SETBACKS`, for attempts whose workers never began: higher, since an attempt may only have waited."""
SILENCE_S = 10.0
"""Silence after which a job's reason mentions it. Runs send a heartbeat every second."""
PREEMPTED_S = 1.0
"""Delay of the next attempt after the preemption of the driver's node."""
STOP_RETRY_INTERVAL_S = 10.0
"""Shortest interval between repeated stops."""


@dataclass(frozen=True)
class Deadlines:
    cancel_s: float
    pause_s: float
    lost_grace_s: float
    grow_after_s: float = 30.0
    """Running time of a worker group before a restart with more workers."""


@dataclass(frozen=True)
class JobFacts:
    """Input of a decision about one active job; times in seconds on one clock."""

    state: State
    now_s: float
    attempt: int
    launch: Literal["due", "submitted"] | None
    """`due`: may be on the cluster. `submitted`: was accepted. None: another attempt is owed."""
    failures: int
    """Failures since the last progress, of kinds without a limit of their own."""
    max_failures: int
    observation: Observation | None
    """None if the cluster could not be reached."""
    retry: RetrySpec = field(default_factory=RetrySpec)
    """The job's retry rules by kind of failure, and its backoff."""
    failures_by_kind: Mapping[str, int] = field(default_factory=dict)
    """Failures since the last progress by kind, for kinds with a rule."""
    setbacks: int = 0
    """Attempts since the last progress that were lost with their cluster after their workers had begun."""
    lost_starts: int = 0
    """As `setbacks`, for attempts whose workers had not begun."""
    began: bool = False
    """Whether a worker group of the attempt ever began; set once its driver is gone."""
    result: Result | None = None
    request: Literal["pause", "cancel", "resize"] | None = None
    """`resize` comes from the controller: commit a checkpoint, then restart with other workers."""
    requested_at: float = 0.0
    unseen_since: float | None = None
    is_confirmed: bool = True
    """False for an attempt that a recovery adopted, until the cluster confirms it."""
    stopped_at: float | None = None
    group_phase: Literal["running", "waiting", "recovering"] | None = None
    group_phase_at: float = 0.0
    group_reason: str = ""
    workers: int = 0
    min_num_workers: int = 0
    room: int | None = None
    """Workers that fit now with a plan, including the job's own; None if unknown or irrelevant."""
    reason: str = ""
    """The job's current reason, as users see it."""
    unreachable: str = ""
    """Description of the cluster's outage; "" while it answers."""
    heard_at: float | None = None
    """Time at which the run last sent anything to this control plane."""
    driver_trouble: str = ""
    """Description of a driver that is stopped or silent; "" for any other."""
    driver_is_frozen: bool = False
    """Whether to kill the driver."""
    runs_nothing: bool = False
    """Whether the cluster's processes for jobs are known to be dead."""
    unreachable_since: float | None = None
    """Start of the outage, as the job's reason states it."""
    saving_trouble: str = ""
    """Checkpoint failures since the last commit; "" if none."""


def decide(job: JobFacts, deadlines: Deadlines) -> Decision:
    """Next step of an active job. Admission is decided elsewhere."""
    decision = _decide(job, deadlines)
    if job.is_confirmed or not isinstance(decision, Retry):
        return decision
    # Storage lacks users' later requests, and another service may launch this job: recovery launches nothing.
    return End(
        State.PAUSED,
        (f"recovered from its storage; {decision.cause}: 'resume' continues from its last committed checkpoint"),
        stops=True,
    )


def _decide(job: JobFacts, deadlines: Deadlines) -> Decision:
    observation = job.observation
    if job.launch is None and job.request is not None:
        return _decide_between_attempts(job)
    if job.unreachable and observation is None:
        if job.runs_nothing and job.state == State.RUNNING:
            return Move(State.RECOVERING, job.unreachable)
        return NoteUnreachable(job.unreachable) if job.unreachable != job.reason else Wait()
    if job.unreachable_since is not None and not job.unreachable and (observation is not None or job.launch is None):
        return NoteReachable(_reason_when_reached(job))
    if job.launch is None:
        return _decide_between_attempts(job)
    if observation is None:
        return Wait()
    if observation.status == "unknown":
        decision = _decide_unknown(job, deadlines)
        return replace(decision, stops=True) if isinstance(decision, End) else decision
    if job.launch == "due":
        return NoteSubmission()
    if job.unseen_since is not None:
        return NoteSeen()
    if not job.is_confirmed and not observation.has_ended:
        return NoteConfirmation()
    if observation.has_ended:
        return _decide_end(job, observation) if observation.released else _explain(job, observation.waiting)
    return _decide_live(job, observation, deadlines)


def _explain(job: JobFacts, *parts: str) -> Decision:
    """Change the job's reason to these parts, unless they are empty or already its reason."""
    reason = "; ".join(filter(None, parts))
    return Explain(reason) if reason and reason != job.reason else Wait()


def _reason_when_reached(job: JobFacts) -> str:
    """The job's reason once its cluster answers again."""
    if job.request is not None:
        return f"the cluster responds again; obeying the request to {job.request}"
    if job.launch is None:
        return "the cluster responds again; starting another attempt"
    return _running_reason(job) if job.group_phase == "running" else "the cluster responds again"


def _running_reason(job: JobFacts) -> str:
    """Reason of a running job, with its current faults."""
    progress = job.group_reason or "its workers started"
    if job.heard_at is not None and job.now_s - job.heard_at >= SILENCE_S:
        since = f"{datetime.fromtimestamp(job.heard_at, UTC):%Y-%m-%dT%H:%M:%SZ}"
        progress += f"; silent since {since}"
    troubles = job.observation.waiting if job.observation is not None else ""
    return "; ".join(filter(None, (progress, job.driver_trouble, job.saving_trouble, troubles)))


def _decide_between_attempts(job: JobFacts) -> Decision:
    if job.request == "cancel":
        return End(State.CANCELLED, "cancelled between two attempts")
    if job.request == "pause":
        return End(State.PAUSED, "paused between two attempts")
    return Wait()


def _decide_unknown(job: JobFacts, deadlines: Deadlines) -> Decision:
    if job.result is not None:
        is_decisive = _is_final(job.result) or job.result.outcome == "preempted"
        return _decide_by_result(job, job.result) if is_decisive else _decide_lost_run(job)
    if job.launch == "due" and job.request in (None, "resize"):
        return Submit()
    if job.launch == "submitted" and job.observation is not None and job.observation.forgotten:
        return _decide_lost_run(job, job.observation.message)
    # A submission whose response was lost may still arrive, so that a due one may appear late.
    if job.unseen_since is None:
        return NoteUnseen()
    if not is_lost(job.now_s, job.unseen_since, deadlines):
        return Wait()
    if job.launch == "due":
        return _apply_request(job, "before its driver was launched")
    return _decide_lost_run(job)


def _is_final(result: Result) -> bool:
    """Whether another attempt could not end differently."""
    return result.outcome not in ("failed", "preempted") or not result.retryable


def _decide_lost_run(job: JobFacts, cause: str = "") -> Decision:
    """Decide about a run that its restarted cluster does not know. That is no failure of the job, even if the driver
    reported dead workers first; but repeated losses pause the job, which may be crashing its cluster."""
    loss = f"attempt {job.attempt} was lost with its cluster" + (f" ({_first_line(cause)})" if cause else "")
    num_lost, limit = job.setbacks + 1, MAX_SETBACKS
    if not job.began:
        loss += ", before its workers started"
        num_lost, limit = job.lost_starts + 1, MAX_LOST_STARTS
    if _must_not_restart(job):
        was_stopped = job.stopped_at is not None and not job.began
        return _apply_request(job, "before its workers started" if was_stopped else loss)
    if num_lost >= limit:
        return End(
            State.PAUSED,
            f"paused: {loss}; {num_lost} attempts were lost without progress, so this job or "
            "another may be bringing the cluster down; find out why (memory, Ray's logs), then "
            "resume it",
        )
    since_progress = f"; {num_lost} lost since its last progress ({limit} pause the job)" if num_lost > 1 else ""
    reason = f"{loss}{since_progress}; another attempt follows, and no failure is counted"
    counts_as: Literal["setback", "lost_start"] = "setback" if job.began else "lost_start"
    # The new cluster is already up: back off only after repeated losses, or if the job sets a backoff.
    is_first = num_lost == 1 and not job.failures and job.retry.backoff is None
    return Retry(reason, 0.0 if is_first else _backoff_s(job, "", job.failures), loss, counts_as)


def is_lost(now_s: float, unseen_since: float | None, deadlines: Deadlines) -> bool:
    """Whether the submission has been unknown for so long that it will not appear."""
    return unseen_since is not None and now_s - unseen_since >= deadlines.lost_grace_s


def _decide_end(job: JobFacts, observation: Observation) -> Decision:
    if job.group_phase == "running" and job.state in (State.STARTING, State.RECOVERING):
        return Move(State.RUNNING, _running_reason(job))  # the group began and ended between two observations
    if job.result is not None:
        return _decide_by_result(job, job.result)
    if observation.refused and not _must_not_restart(job):
        return End(State.FAILED, f"the cluster refused the launch: {_first_line(observation.message)}")
    message = f": {_first_line(observation.message)}" if observation.message.strip() else ""
    description = f"the driver of attempt {job.attempt} ended ({observation.status}) without a result{message}"
    if job.stopped_at is not None and job.request is None:  # without a request, only frozen drivers are stopped
        description = f"the frozen driver of attempt {job.attempt} was killed"
    if observation.preempted and not _must_not_restart(job):
        return Retry(
            f"{description}; another attempt follows, and no failure is counted", PREEMPTED_S, description, None
        )
    if observation.lost and job.stopped_at is None:
        return _decide_lost_run(job, observation.message)
    return _decide_driver_death(job, description, "driver")


def _decide_by_result(job: JobFacts, result: Result) -> Decision:
    match result.outcome:
        case "succeeded":
            return End(State.SUCCEEDED, result.message.strip() or f"finished at step {result.step}")
        case "cancelled":
            return End(State.CANCELLED, result.message.strip() or f"cancelled at step {result.step}")
        case "paused":
            if job.request == "cancel":
                return End(State.CANCELLED, f"cancelled while pausing, at step {result.step}")
            if job.request == "resize" and job.state != State.PAUSING:
                return Resize(f"resumes from step {result.step} with a different number of workers than {job.workers}")
            return End(State.PAUSED, result.message.strip() or f"paused at step {result.step}")
        case "preempted":
            cause = f"attempt {job.attempt} saved step {result.step} and ended: {_first_line(result.message)}"
            if _must_not_restart(job):
                return _apply_request(job, cause)
            return Retry(f"{cause}; another attempt follows, and no failure is counted", PREEMPTED_S, cause, None)
        case "failed":
            if _is_final(result) and job.request != "cancel":
                return End(State.FAILED, _first_line(result.message) or f"failed at step {result.step}")
            description = f"attempt {job.attempt} failed at step {result.step}: {_first_line(result.message)}"
            return _decide_driver_death(job, description, result.failure_kind)


def _decide_driver_death(job: JobFacts, description: str, kind: str) -> Decision:
    """Decide about a driver that died early: obey a request, retry, or fail the job."""
    if _must_not_restart(job):
        return _apply_request(job, description)
    failures, limit, name = job.failures, job.max_failures, "retry.max_failures"
    if (own_limit := job.retry.own_limit(kind)) is not None:
        failures, limit, name = (job.failures_by_kind.get(kind, 0), own_limit, f"retry.kinds.{kind}.max_failures")
    if failures >= limit:
        return End(State.FAILED, f"{description}; {name} (={limit}) is exhausted")
    allowance = f"failure {failures + 1} of {limit} allowed"
    if kind in job.retry.kinds:
        allowance += f" of kind {kind}" if own_limit is not None else f" ({kind})"
    after_s = _backoff_s(job, kind, failures)
    if job.retry.backoff_of(kind) is not None:
        allowance += f", retrying in {after_s:g} s"
    return Retry(f"{description}; {allowance}", after_s, description, kind=kind)


def _backoff_s(job: JobFacts, kind: str, failures: int) -> float:
    """Seconds before the next attempt, after `failures` that count towards the same limit."""
    return (job.retry.backoff_of(kind) or Backoff()).wait_s(failures + job.setbacks + job.lost_starts)


def _must_not_restart(job: JobFacts) -> bool:
    """Whether the user has requested that the job end or pause."""
    return job.request in ("pause", "cancel") or job.state == State.PAUSING


def _apply_request(job: JobFacts, cause: str) -> Decision:
    if job.request == "cancel":
        return End(State.CANCELLED, f"cancelled: {cause}")
    return End(State.PAUSED, f"paused: {cause}; resumes from the last committed checkpoint")


def _decide_live(job: JobFacts, observation: Observation, deadlines: Deadlines) -> Decision:
    if job.request in ("pause", "cancel") and observation.status == "pending" and observation.waiting:
        # There is no driver to obey yet.
        return Stop(f"obeying the request to {job.request} before its driver starts") if _may_stop(job) else Wait()
    if job.request is not None:
        deadline_s = deadlines.cancel_s if job.request == "cancel" else deadlines.pause_s
        overdue = job.now_s - job.requested_at > deadline_s
        if overdue and _may_stop(job):
            return Stop(f"did not {job.request} within {deadline_s:g} s: killing its driver")
    if job.driver_is_frozen:
        # Ray kills a driver that ignores SIGTERM; if that fails because Ray hangs, the second stop kills it directly.
        return Stop(job.driver_trouble, kills=job.stopped_at is not None) if _may_stop(job) else Wait()
    if (resize := _decide_resize(job, deadlines)) is not None:
        return resize
    if job.group_phase == "running" and job.state in (State.STARTING, State.RECOVERING):
        return Move(State.RUNNING, _running_reason(job))
    if job.group_phase == "waiting" and job.state in (State.STARTING, State.RECOVERING):
        return _explain(job, job.group_reason, observation.waiting, job.driver_trouble)
    is_between = job.state in (State.STARTING, State.RECOVERING) and job.request is None
    if is_between and observation.waiting:
        return _explain(job, observation.waiting, job.driver_trouble)
    if is_between and job.driver_trouble and job.driver_trouble not in job.reason:
        return Explain("; ".join(filter(None, (job.reason, job.driver_trouble))))
    if job.group_phase in ("recovering", "waiting") and job.state == State.RUNNING:
        return Move(State.RECOVERING, job.group_reason or "its worker group died; a new one is starting")
    if job.group_phase == "running" and job.state == State.RUNNING and job.request is None:
        return Explain(reason) if (reason := _running_reason(job)) != job.reason else Wait()
    return Wait()


def _may_stop(job: JobFacts) -> bool:
    """Whether to send a stop: none was sent yet, or the last one long enough ago."""
    return job.stopped_at is None or job.now_s - job.stopped_at > STOP_RETRY_INTERVAL_S


def _decide_resize(job: JobFacts, deadlines: Deadlines) -> Decision | None:
    """Resize to fewer workers for a dead group, to more for a steady one, as the cluster has room."""
    if job.room is None or job.request is not None:
        return None
    if job.group_phase in ("recovering", "waiting") and job.min_num_workers <= job.room < job.workers:
        return Resize(f"the cluster now has room for only {job.room} of its {job.workers} workers")
    steady = job.group_phase == "running" and job.now_s - job.group_phase_at >= deadlines.grow_after_s
    if steady and job.state == State.RUNNING and job.room > job.workers:
        return AskResize(f"the cluster now has room for {job.room} workers, up from {job.workers}")
    return None


def _first_line(message: str, limit: int = 500) -> str:
    lines = message.strip().splitlines()
    return (lines[0] if lines else "")[:limit]
