"""The controller: observes jobs, asks the policies, and carries out one action per job and step.

Every step is safe against SIGKILL: intent is stored before it is acted on, outcomes are observed, and submission ids
survive a restart. So the next controller continues where this one stopped, and nothing is launched twice.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import structlog

from moe.storage.folder import Folder
from service.control.errors import ServiceError
from service.control.jobs.changes import explain, schedule_attempt, set_state
from service.control.jobs.lease import Lease, LeaseLost
from service.control.jobs.roots import StorageRoots
from service.control.jobs.stored_jobs import read_result
from service.control.launcher.launcher import ClusterKind, Launcher, LauncherUnavailable, LaunchPostponed, Observation
from service.control.report.catch_up import catch_up
from service.control.report.failure_history import read_failures
from service.control.report.ingest import Ingest
from service.control.report.last_output import store_last_output
from service.control.report.saves import read_saves
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
from service.control.scheduling.deduplicator import Deduplicator
from service.control.scheduling.policies import Deadlines, JobFacts, decide, is_lost
from service.control.scheduling.queue_reasons import QueueReasons
from service.control.scheduling.reachability import Reachability
from service.control.scheduling.starter import ACTOR, Starter
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.jobs import JobRow, get_job, jobs_in
from service.control.store.writers import newest_group
from service.wire.attempt_folder import AttemptFolder, launch_prefix
from service.wire.launch import submission_id
from service.wire.states import ACTIVE, State

BUSY_INTERVAL_S = 0.02
"""Interval after a step that did something."""
log = structlog.get_logger(__name__)


class Controller:
    """Drives all jobs, one `step` after another, while it holds the lease."""

    def __init__(
        self,
        database: Database,
        lease: Lease,
        launcher: Launcher,
        starter: Starter,
        ingest: Ingest,
        roots: StorageRoots,
        deadlines: Deadlines,
        chores: Sequence[Callable[[], bool]] = (),
    ) -> None:
        """`chores`: other tasks, of which a step runs a small part; they return whether there was anything to do."""
        self._database, self._lease = database, lease
        self._chores = chores
        self._starter, self._ingest, self._deadlines = starter, ingest, deadlines
        self._roots = roots
        self._reachability = {
            kind: Reachability(on_silence=partial(starter.forget_cluster, kind)) for kind in launcher.by_kind()
        }
        self._queue_reasons = QueueReasons(database, lease, starter.cluster_of)
        self._deduplicator = Deduplicator()
        self._queued_elsewhere: set[tuple[str, int]] = set()
        """(job id, attempt) of those that wait in the cluster's own queue."""
        self._wake = threading.Event()
        self._is_stopped = False
        self.last_step_at: float | None = None
        """Monotonic time of the last step, for readiness."""

    @property
    def cluster_answers(self) -> bool:
        """Whether all clusters answered all queries of the last step."""
        return all(reachability.since is None for reachability in self._reachability.values())

    @property
    def unreachable(self) -> dict[ClusterKind, str]:
        """Outages by kind of cluster, worded as in the reasons of jobs; empty while all clusters answer, or while this
        control plane is not acting."""
        return {
            kind: outage
            for kind, reachability in self._reachability.items()
            if (outage := reachability.describe_outage())
        }

    @property
    def clusters(self) -> tuple[ClusterKind, ...]:
        """Kinds of clusters that this service offers."""
        return tuple(self._reachability)

    @property
    def acting(self) -> bool:
        return self._lease.is_held

    def is_queued_elsewhere(self, job_id: str, attempt: int) -> bool:
        """Whether the attempt waits in the cluster's own queue; False on a control plane that is not acting."""
        return self._lease.is_held and (job_id, attempt) in self._queued_elsewhere

    def run(self, interval_s: float) -> None:
        """Step until `stop`, at least every `interval_s`; then release the lease."""
        previous_failure = ""
        while not self._is_stopped:
            self._wake.clear()
            did_work, failure = False, ""
            try:
                did_work = self.step()
            except ServiceError as refusal:  # the store cannot be written now
                failure = str(refusal)
                if failure != previous_failure:
                    log.error("a controller step failed", why=failure)
            except Exception as error:
                failure = repr(error)
                if failure != previous_failure:  # logged once, not at every step
                    log.exception("a controller step failed")
            previous_failure = failure
            self.last_step_at = time.monotonic()
            self._wake.wait(BUSY_INTERVAL_S if did_work else interval_s)
        with suppress(ServiceError):  # the store cannot be written: the lease expires
            self._lease.release()

    def wake(self) -> None:
        """Start the next step at once; callable from any thread."""
        self._wake.set()

    def stop(self) -> None:
        """Make `run` return after its current step; callable from any thread."""
        self._is_stopped = True
        self._wake.set()

    def step(self) -> bool:
        """Process every active job and the queue once; False if nothing was done, or if another control plane acts."""
        self._database.look()  # before any action, so that every action can be recorded
        if not self._lease.take():
            return False
        did_work = False
        for reachability in self._reachability.values():
            reachability.begin_step()
        try:
            for chore in self._chores:
                did_work |= self._run_chore(chore)
            self._note_silence()  # so that this step does not query an unreachable cluster again
            with self._database.read() as tx:
                jobs = jobs_in(tx, ACTIVE)
            self._ingest.statuses.forget_all_but({job.id for job in jobs})
            self._queued_elsewhere &= {(job.id, job.attempt) for job in jobs}
            self._deduplicator.keep_only(
                {(kind, job.number) for job in jobs for kind in ("decided", "failed")} | set(self._chores)
            )
            for job in jobs:
                self._lease.require()  # renews the lease during a long step
                did_work |= self._advance(job)
            if any(reachability.answers for reachability in self._reachability.values()):
                did_work |= self._admit()
            for reachability in self._reachability.values():
                reachability.end_step()
            did_work |= self._explain_reachability()
        except LeaseLost:
            log.warning("another control plane has taken over; this one stops acting")
        return did_work

    def _run_chore(self, chore: Callable[[], bool]) -> bool:
        try:
            did_work = chore()
        except LeaseLost:
            raise
        except Exception as error:
            if self._deduplicator.is_new(chore, repr(error)):
                log.exception("a chore failed; jobs are not affected")
            return False
        self._deduplicator.forget(chore)
        return did_work

    def _note_silence(self) -> None:
        for kind, error in self._starter.silent_clusters().items():
            if self._reachability[kind].answers:
                self._reachability[kind].record_failure(error)

    def _admit(self) -> bool:
        did_work = False
        silent = {kind for kind, reachability in self._reachability.items() if not reachability.answers}
        try:
            for job in self._starter.admit(silent):
                did_work |= self._advance(job)
        except LauncherUnavailable as error:  # no cluster answers
            for kind in self._reachability.keys() - silent:
                self._reachability[kind].record_failure(error)
        self._note_silence()
        return did_work

    def _explain_reachability(self) -> bool:
        """Tell queued jobs whether their clusters answer."""
        did_work = False
        answering = {kind for kind, reachability in self._reachability.items() if reachability.since is None}
        if answering:
            did_work = self._queue_reasons.explain_reachable(answering)
        for kind, reachability in self._reachability.items():
            if reachability.since is not None and (outage := reachability.describe_outage()):
                self._queue_reasons.explain_unreachable(kind, outage, reachability.since)
        return did_work

    def _reachability_of(self, job: JobRow) -> Reachability:
        return self._reachability[self._starter.cluster_of(job)]

    def _advance(self, job: JobRow) -> bool:
        """Decide the next action for a job and carry it out; False if there was nothing to do."""
        try:
            observation = self._observe(job)
            if observation is None:
                return False
            job, facts = observation
            decision = decide(facts, self._deadlines)
            if isinstance(decision, Wait):
                return False
            if self._deduplicator.is_new(("decided", job.number), (job.attempt, job.state, decision)):
                log.info("decided", job=job.id, attempt=job.attempt, state=job.state, **_to_log(decision))
            self._execute(job, decision)
        except LaunchPostponed as error:
            self._explain(job, f"waiting to be launched: {error}")
            return False
        except LauncherUnavailable as error:
            # The decision was not carried out: a cluster may answer queries and refuse submissions.
            reachability = self._reachability_of(job)
            reachability.record_failure(error)
            outage = reachability.describe_outage(_seconds(job.unreachable_since))
            if outage and outage != job.reason:
                self._note_unreachable(job, outage)
            return False
        except LeaseLost:
            raise
        except Exception as error:
            # One job's error must not hold up the others; the next step retries.
            if self._deduplicator.is_new(("failed", job.number), (job.attempt, job.state, repr(error))):
                log.exception("could not advance a job", job=job.id, state=job.state)
            self._explain(job, f"cannot continue, will retry: {error}")
            return False
        return True

    def _observe(self, job: JobRow) -> tuple[JobRow, JobFacts] | None:
        """(job, facts); None while its storage cannot be read."""
        observation: Observation | None = None
        result = None
        began = False
        now_s = time.time()
        reachability = self._reachability_of(job)
        if job.launch is not None and reachability.answers:  # one timeout per step is enough
            try:
                observation = self._starter.launcher_of(job).observe(submission_id(job.id, job.attempt))
            except LauncherUnavailable as error:
                reachability.record_failure(error)
            else:
                self._note_queue(job, observation)
        if observation is not None and (observation.has_ended or observation.status == "unknown"):
            try:
                storage = self._roots.folder(job.storage)
                result = read_result(storage, job.attempt)
                has_ended = observation.has_ended and observation.released
                is_gone = observation.forgotten or is_lost(now_s, _seconds(job.unseen_since), self._deadlines)
                if result is not None or has_ended or is_gone:
                    # Catch up before deciding: unreported failures count, and the end comes last.
                    catch_up(self._ingest, job.id, job.attempt, storage)
                if has_ended and result is None and observation.output:
                    self._store_last_output(job, storage, observation.output)
            except OSError as error:
                log.warning("cannot read a job's storage; will retry", job=job.id, error=str(error))
                self._explain(job, f"cannot read its storage: {error}; will retry")
                return None
            with self._database.read() as tx:
                job = get_job(tx, job.id) or job
                began = newest_group(tx, job.number)[0] == job.attempt
        driver = None
        if observation is not None and not observation.has_ended and observation.status != "unknown":
            driver = self._ingest.statuses.silent_driver(job.id, job.attempt, _launch_of(job))
        losses, retry = read_failures(job.losses, job.failures), self._starter.spec(job).retry
        return job, JobFacts(
            state=State(job.state),
            now_s=now_s,
            attempt=job.attempt,
            launch=cast(Any, job.launch),
            failures=losses.num_sharing(retry),
            setbacks=len(losses.setbacks),
            lost_starts=len(losses.lost_starts),
            began=began,
            max_failures=retry.max_failures,
            retry=retry,
            failures_by_kind={kind: losses.num_of(kind) for kind in retry.kinds},
            observation=observation,
            result=result,
            request=cast(Any, job.request),
            requested_at=_seconds(job.requested_at) or 0.0,
            unseen_since=_seconds(job.unseen_since),
            is_confirmed=job.unconfirmed_since is None,
            stopped_at=_seconds(job.stopped_at),
            group_phase=cast(Any, job.group_phase),
            group_phase_at=_seconds(job.group_phase_at) or 0.0,
            group_reason=job.group_reason or "",
            workers=gang.workers if (gang := self._starter.gang(job)) else 0,
            min_num_workers=self._starter.spec(job).resources.min_num_workers,
            room=self._starter.room_for(job) if reachability.answers else None,
            reason=job.reason,
            unreachable=reachability.describe_outage(_seconds(job.unreachable_since)),
            heard_at=self._ingest.statuses.heard_at(job.id),
            driver_trouble="" if driver is None else str(driver),
            driver_is_frozen=driver is not None and driver.is_frozen,
            runs_nothing=reachability.runs_nothing,
            unreachable_since=_seconds(job.unreachable_since),
            saving_trouble=read_saves(job.saves).trouble(),
        )

    def _note_queue(self, job: JobRow, observation: Observation) -> None:
        if observation.queued:
            self._queued_elsewhere.add((job.id, job.attempt))
        else:
            self._queued_elsewhere.discard((job.id, job.attempt))

    def _store_last_output(self, job: JobRow, storage: Folder, output: str) -> None:
        try:
            store_last_output(storage, job.attempt, output)
        except OSError as error:  # decisions do not depend on it
            log.warning("cannot save a dead driver's output", job=job.id, error=str(error), output=output)

    def _execute(self, job: JobRow, decision: Decision) -> None:
        match decision:
            case Wait():
                pass
            case Submit():
                self._starter.submit(job)
            case NoteSubmission():
                self._starter.note_submitted(job)
            case NoteUnseen():
                self._starter.note(job, unseen_since=now_us())
            case NoteConfirmation():
                self._starter.note(job, unconfirmed_since=None)
            case NoteSeen():
                self._starter.note(job, unseen_since=None)
            case Move(state, reason):
                # A cluster of the job's own has no dashboard before its driver runs.
                values = {"dashboard_url": job.dashboard_url or self._starter.dashboard_url(job)}
                with self._lease.change(job) as (tx, events):
                    events += set_state(tx, job, state, reason, ACTOR, values)
            case NoteUnreachable(reason):
                self._note_unreachable(job, reason)
            case NoteReachable(reason):
                self._explain(job, reason, {"unreachable_since": None})
            case Explain(reason):
                self._explain(job, reason)
            case Stop(reason, kills):
                self._explain(job, reason, {"stopped_at": now_us()})
                self._stop(job)
                if kills and self._ingest.statuses.end_driver(job.id, job.attempt, _launch_of(job)):
                    log.warning("killed a frozen driver", job=job.id, attempt=job.attempt)
            case Retry(reason, after_s, _, counts_as, kind):
                # The attempt may still run although the cluster does not report it.
                self._stop(job)
                self._fence(job)
                retry_at = now_us() + int(after_s * 1e6)
                with self._lease.change(job) as (tx, events):
                    events += schedule_attempt(tx, job, reason, ACTOR, retry_at, counts_as=counts_as, kind=kind)
            case AskResize(reason):
                self._explain(job, reason, {"request": "resize", "requested_at": now_us()})
            case Resize(reason):
                self._stop(job)
                with self._lease.change(job) as (tx, events):
                    events += schedule_attempt(tx, job, reason, ACTOR, now_us(), counts_as=None)
            case End(state, reason, stops):
                if stops:
                    self._stop(job)
                    self._fence(job)
                result = read_result(self._roots.folder(job.storage), job.attempt) if job.attempt else None
                values = {"result": result.model_dump_json()} if result is not None else {}
                with self._lease.change(job) as (tx, events):
                    events += set_state(tx, job, state, reason, ACTOR, values)

    def _stop(self, job: JobRow) -> None:
        self._lease.require()
        self._starter.launcher_of(job).stop(submission_id(job.id, job.attempt))

    def _fence(self, job: JobRow) -> None:
        """Claim the driver's role in an attempt that is over. A control plane that has lost its lease may still submit
        the attempt, and its driver must not start."""
        AttemptFolder(job.storage, job.attempt).claim_driver()

    def _note_unreachable(self, job: JobRow, reason: str) -> None:
        since = job.unreachable_since or int((self._reachability_of(job).since or time.time()) * 1e6)
        self._explain(job, reason, {"unreachable_since": since})

    def _explain(self, job: JobRow, reason: str, values: Mapping[str, Any] | None = None) -> None:
        with self._lease.change(job) as (tx, events):
            events += explain(tx, job, reason, ACTOR, values)


def _to_log(decision: Decision) -> dict[str, str]:
    reason = getattr(decision, "reason", "")
    return {"decision": type(decision).__name__.lower(), **({"reason": reason} if reason else {})}


def _launch_of(job: JobRow) -> str:
    return launch_prefix(job.storage, job.attempt)


def _seconds(time_us: int | None) -> float | None:
    return None if time_us is None else time_us / 1e6
