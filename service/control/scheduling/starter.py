"""Starts jobs: next attempts of active jobs first, then the queue in order."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import structlog
from pydantic import SecretStr, ValidationError

from moe.plan import Plan, PlanQuery
from moe.spec import JobSpec, ModuleModelSpec, SpecError
from moe.spec.problems import problems_of
from service.control.errors import Unavailable
from service.control.jobs.changes import explain, record_plan, set_state
from service.control.jobs.data_roots import DataRoots
from service.control.jobs.earlier_releases import is_of_module, read_stored_plan, read_stored_spec
from service.control.jobs.lease import Lease, LeaseLost
from service.control.launcher.launcher import ClusterFacts, ClusterKind, Launcher, LauncherUnavailable, LaunchRefusal
from service.control.report.failure_history import read_failures
from service.control.report.history import measured_load_skew
from service.control.report.tokens import TokenMint, hash_token
from service.control.scheduling.admission import Admit, MustWait, NeverFits, PlanPending, admit, fingerprint
from service.control.scheduling.cluster_watch import ClusterWatch
from service.control.scheduling.deduplicator import Deduplicator
from service.control.scheduling.gang import Gang
from service.control.scheduling.module_plans import BEING_PLANNED, ModulePlans
from service.control.scheduling.planning import first_pool, module_cluster, plan_for, planning_cluster, plans_to_try
from service.control.scheduling.start_limits import StartLimits
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.jobs import JobRow, change_job, first_queued, get_job, jobs_in, jobs_without_plan
from service.wire.launch import Launch, submission_id
from service.wire.states import ACTIVE, WAITS, State

ACTOR = "controller"
FACTS_AGE_S = 2.0
MAX_PLANNED = 20
"""Maximum number of queued module jobs whose plans are handled in one step."""
log = structlog.get_logger(__name__)


class Starter:
    """Admits jobs, stores their next attempts, and submits them."""

    def __init__(
        self,
        database: Database,
        lease: Lease,
        launcher: Launcher,
        watch: ClusterWatch,
        mint: TokenMint,
        *,
        events_url: str,
        cache: str,
        data_roots: DataRoots,
        allowed_code: tuple[str, ...],
        modules: ModulePlans,
    ) -> None:
        self._database, self._lease, self._launcher = database, lease, launcher
        self._watch, self._mint = watch, mint
        self._events_url, self._cache, self._data_roots = events_url, cache, data_roots
        self._allowed_code, self._modules = allowed_code, modules
        self._deduplicator = Deduplicator()
        self._specs: dict[int, JobSpec] = {}
        self._room: dict[int, tuple[tuple[int, str], int | None]] = {}
        """Last query and result of `room_for`, by job number: every new result costs a plan."""

    def forget_cluster(self, kind: ClusterKind) -> None:
        """Discard a cluster's facts: it is known to be unreachable."""
        self._watch.expire(kind)

    def silent_clusters(self) -> Mapping[ClusterKind, LauncherUnavailable]:
        """Clusters that do not answer; empty if there is only one cluster."""
        return self._watch.silent_clusters(FACTS_AGE_S)

    def admit(self, silent: Collection[ClusterKind] = ()) -> list[JobRow]:
        """Admit jobs: store their next attempts as due, and return the jobs. `silent`: clusters that are known to be
        unreachable. Raises LauncherUnavailable if no cluster answers, LeaseLost."""
        # Query even if nothing is admitted: every step must learn whether the cluster is reachable.
        facts = self._watch.facts(FACTS_AGE_S)
        with self._database.read() as tx:
            active = jobs_in(tx, ACTIVE)
        self._forget_all_but(active)
        gangs = {job.id: gang for job in active if (gang := self.gang(job)) and not self._is_queued_elsewhere(job)}
        starting = (job for job in active if job.launch is not None and job.state == State.STARTING)
        num_starting = sum(job.group_phase != "waiting" and not self._is_on_pool(job) for job in starting)
        silent = {*silent, *self.silent_clusters()}
        limits = StartLimits(num_starting, facts.clusters - silent)
        for kind in silent:
            limits.note_wait(kind)
        due_jobs: list[JobRow] = []
        self._plan_queued_modules()
        for job in self._queue_order(active, limits):
            if limits.is_over:
                break
            if not limits.allow(cluster := self.cluster_of(job)):
                continue
            try:
                verdict = self._try_to_start(job, gangs)
            except (LauncherUnavailable, LeaseLost):
                raise
            except Exception as error:
                # One job's error must not hold up the others; the next step retries.
                if self._deduplicator.is_new(job.number, repr(error)):
                    log.exception("could not admit a job", job=job.id)
                with self._lease.change(job) as (tx, events):
                    events += explain(tx, job, f"cannot be admitted, will retry: {error}", ACTOR)
                continue
            if isinstance(verdict, MustWait):
                limits.note_wait(cluster)
            if isinstance(verdict, JobRow):
                if not self._is_queued_elsewhere(verdict):
                    gangs[job.id] = Gang.from_dict(json.loads(verdict.gang or "{}"))
                limits.note_start(cluster)
                due_jobs.append(verdict)
        return due_jobs

    def cluster_of(self, job: JobRow) -> ClusterKind:
        """Kind of cluster that the job's attempt runs on, or the next one will."""
        kinds = tuple(self._launcher.by_kind())
        kind: ClusterKind | None = None
        if (gang := self.gang(job)) is not None:
            kind = "own" if gang.pool else "shared"
        else:
            with suppress(ValidationError):  # `_try_to_start` reports it
                kind = self.spec(job).resources.cluster
        return kind if kind in kinds else kinds[0]

    def launcher_of(self, job: JobRow) -> Launcher:
        """Launcher of the job's attempt."""
        gang = self.gang(job)
        return self._launcher.of_pool(None if gang is None else gang.pool)

    def _is_queued_elsewhere(self, job: JobRow) -> bool:
        """Whether the cluster's own queue decides when the job runs, so that its gang holds nothing here."""
        return self._is_on_pool(job) and bool(self._queue_of(job))

    def _queue_of(self, job: JobRow) -> str:
        """The cluster's own queue of the job; "" without one."""
        with suppress(ValidationError):
            return self._launcher.queue_of(self.spec(job).resources)
        return ""

    def _is_on_pool(self, job: JobRow) -> bool:
        """Whether the attempt has a Ray cluster of its own, whose start is no burden to others."""
        return bool((gang := self.gang(job)) and gang.pool)

    def submit(self, job: JobRow) -> None:
        """Submit a due attempt; idempotent. Raises LauncherUnavailable, LaunchPostponed, LeaseLost."""
        spec, plan = self.spec(job), read_stored_plan(job.plan)
        gang = Gang.from_dict(json.loads(job.gang or "{}"))
        assert plan is not None, "an attempt is stored with its plan"
        losses, token = read_failures(job.losses, job.failures), self._mint.token(job.id, job.attempt)
        if hash_token(token) != job.token_hash:
            # Stored by another control plane, with another key.
            self.note(job, token_hash=hash_token(token))
        launch = Launch(
            job_id=job.id,
            attempt=job.attempt,
            spec=spec,
            plan=plan,
            trials=self._trials(spec, plan, gang),
            gpus_per_worker=gang.gpus_per_worker,
            pool=gang.pool,
            owner=job.owner,
            instance=self._mint.instance,
            storage=job.storage,
            cache=self._cache,
            data_roots=self._data_roots.of(spec),
            allowed_code=self._allowed_code,
            events_url=self._events_url,
            token=SecretStr(token),
            max_failures=losses.num_left(spec.retry, ""),
            failures_left={
                kind: losses.num_left(spec.retry, kind)
                for kind in spec.retry.kinds
                if spec.retry.own_limit(kind) is not None
            },
            pause_at=job.pause_at,
        )
        self._lease.require()
        try:
            self._launcher.submit(launch)
        except LaunchRefusal as error:
            with self._lease.change(job) as (tx, events):
                events += set_state(tx, job, State.FAILED, f"the cluster refused the launch: {error}", ACTOR)
            return
        self.note_submitted(job)

    def _trials(self, spec: JobSpec, plan: Plan, gang: Gang) -> tuple[Plan, ...]:
        """Plans to measure, if the job asks for that and has not done it yet."""
        if spec.parallel.auto != "measured" or plan.tried:
            return ()
        plans = plans_to_try(spec, self._watch.facts(FACTS_AGE_S).of_pool(gang.pool), plan.num_workers)
        return plans if len(plans) > 1 else ()

    def gang(self, job: JobRow) -> Gang | None:
        """Resources that the job's attempt holds."""
        return Gang.from_dict(json.loads(job.gang)) if job.launch and job.gang else None

    def room_for(self, job: JobRow) -> int | None:
        """Workers that the job could have now with a plan, including its own. None for a fixed number of workers or a
        job of the cluster's own queue, while queued jobs wait, and if the cluster does not answer or holds too few."""
        spec, gang = self.spec(job), self.gang(job)
        is_fixed = spec.resources.min_num_workers == spec.resources.max_num_workers
        if gang is None or is_fixed or self._is_queued_elsewhere(job):
            return None
        try:
            facts = self._watch.facts(FACTS_AGE_S)
        except LauncherUnavailable:
            return None
        with self._database.read() as tx:
            other_gangs = {
                other_job.id: other_gang
                for other_job in jobs_in(tx, ACTIVE)
                if other_job.id != job.id and (other_gang := self.gang(other_job))
            }
            has_queued_jobs = first_queued(tx, State.QUEUED, fingerprint(facts), (-1, -1)) is not None
        verdict = admit(spec.resources, facts, other_gangs)
        if not isinstance(verdict, Admit) or verdict.gang.workers == gang.workers:
            return None
        if has_queued_jobs and verdict.gang.workers > gang.workers:
            return None
        key = (verdict.gang.workers, fingerprint(facts))
        if self._room.get(job.number, (None,))[0] != key:  # the same until the cluster or the job changes
            outcome = self._plan(job, spec, facts, verdict.gang)
            if isinstance(outcome, MustWait):
                return None  # its plan is not made yet
            self._room[job.number] = (key, outcome.num_workers if isinstance(outcome, Plan) else None)
        return self._room[job.number][1]

    def note_submitted(self, job: JobRow) -> None:
        """Store that the cluster has the attempt, and its dashboard URL."""
        self.note(job, launch="submitted", dashboard_url=self.dashboard_url(job))

    def dashboard_url(self, job: JobRow) -> str | None:
        """Dashboard URL of the job's attempt, if the cluster has one now."""
        try:
            return self.launcher_of(job).dashboard_url(submission_id(job.id, job.attempt))
        except LauncherUnavailable:
            return None

    def note(self, job: JobRow, **values: object) -> None:
        """Store columns of the attempt, if it is still the newest."""
        with self._lease.change(job) as (tx, _):
            change_job(tx, job.number, ACTIVE, values, attempt=job.attempt)

    def spec(self, job: JobRow) -> JobSpec:
        """The stored spec. Raises ValidationError for one that this release cannot run."""
        if job.number not in self._specs:
            self._specs[job.number] = read_stored_spec(job.spec)
        return self._specs[job.number]

    def _queue_order(self, active: Collection[JobRow], limits: StartLimits) -> Iterator[JobRow]:
        time_us = now_us()
        due_jobs = [job for job in active if job.launch is None and job.request is None]
        yield from (job for job in due_jobs if (job.retry_at or 0) <= time_us)
        for due_job in due_jobs:
            if (due_job.retry_at or 0) > time_us and not self._queue_of(due_job):
                limits.note_wait(self.cluster_of(due_job))  # its attempt comes before the queue
        position = (-1, -1)
        while True:
            cluster = fingerprint(self._watch.facts(FACTS_AGE_S))
            with self._database.read() as tx:
                job = first_queued(tx, State.QUEUED, cluster, position)
            if job is None:
                return
            position = (job.queued_at, job.number)
            yield job

    def _plan_queued_modules(self) -> None:
        """Store finished plans of queued module jobs, and start missing ones. A job whose planning fails has failed."""
        with self._database.read() as tx:
            jobs = [job for job in jobs_without_plan(tx, State.QUEUED, MAX_PLANNED) if is_of_module(job.spec)]
        for job in jobs:
            with suppress(Unavailable, ValidationError):
                spec = self.spec(job)
                cluster = planning_cluster(spec, self._watch.facts(FACTS_AGE_S))
                if cluster is None:
                    continue
                try:
                    plan = self._modules.begin(spec, module_cluster(spec, cluster))
                except SpecError as error:
                    with self._lease.change(job) as (tx, events):
                        events += set_state(tx, job, State.FAILED, f"its module cannot be planned: {error}", ACTOR)
                    continue
                reason = WAITS if plan else f"{WAITS}; {BEING_PLANNED}"
                values = {"plan": plan.model_dump_json()} if plan else {}
                if plan or job.reason != reason:
                    with self._lease.change(job) as (tx, events):
                        events += explain(tx, job, reason, ACTOR, values)

    def _try_to_start(self, job: JobRow, gangs: dict[str, Gang]) -> JobRow | MustWait | NeverFits | PlanPending:
        """Store the job's next attempt if it fits now, and return the job; otherwise return the verdict, and set its
        reason as the job's."""
        facts = self._watch.facts(FACTS_AGE_S)
        try:
            spec = self.spec(job)
        except ValidationError as error:
            reason = f"this release cannot read its stored spec: {problems_of(error)[0]}"
            with self._lease.change(job) as (tx, events):
                events += set_state(tx, job, State.FAILED, reason, ACTOR)
            return NeverFits(reason)
        if job.state == State.QUEUED and job.plan is None and isinstance(spec.model, ModuleModelSpec):
            return PlanPending()  # other jobs may start before it
        # The cluster's own queue orders its jobs: every job that fits empty pools is passed on to it.
        verdict = admit(spec.resources, facts, {} if self._launcher.queue_of(spec.resources) else gangs)
        outcome = self._plan(job, spec, facts, verdict.gang) if isinstance(verdict, Admit) else verdict
        if isinstance(outcome, Plan):
            assert isinstance(verdict, Admit)
            return self._store_attempt(job, outcome, verdict.gang)
        is_unfit = isinstance(outcome, NeverFits) and job.state == State.QUEUED
        with self._lease.change(job) as (tx, events):
            values: dict[str, object] = {"unfit_for": fingerprint(facts)} if is_unfit else {}
            if job.state == State.QUEUED and job.unreachable_since is not None:
                values["unreachable_since"] = None
            events += explain(tx, job, outcome.reason, ACTOR, values)
        return outcome

    def _store_attempt(self, job: JobRow, plan: Plan, admitted_gang: Gang) -> JobRow | NeverFits:
        """Store the next attempt as `due`, so that it is found after a crash."""
        attempt = job.attempt + 1
        gang = replace(admitted_gang, workers=plan.num_workers)
        values = {
            "attempt": attempt,
            "launch": "due",
            "plan": plan.model_dump_json(),
            "gang": json.dumps(gang.to_dict()),
            "token_hash": hash_token(self._mint.token(job.id, attempt)),
            "unfit_for": None,
            "unreachable_since": None,
            "retry_at": None,
            "dashboard_url": None,
        }
        reason = f"attempt {attempt}: {gang}"
        previous_plan = read_stored_plan(job.plan)
        with self._lease.change(job) as (tx, events):
            if job.state == State.QUEUED:
                events += set_state(tx, job, State.STARTING, reason, ACTOR, values)
            else:
                events += explain(tx, job, reason, ACTOR, values)
            updated_job = get_job(tx, job.id)
            if updated_job is not None and updated_job.attempt == attempt and (attempt == 1 or previous_plan != plan):
                events += record_plan(tx, job, plan, previous_plan if previous_plan != plan else None, attempt, ACTOR)
        if updated_job is None or updated_job.attempt != attempt:
            return NeverFits("was just cancelled or paused")
        log.info("admitted", job=job.id, attempt=attempt, gang=str(gang))
        return updated_job

    def _plan(self, job: JobRow, spec: JobSpec, facts: ClusterFacts, gang: Gang) -> Plan | MustWait | NeverFits:
        """The stored plan if it matches this gang; else a new one for the largest feasible number of workers, with
        measured expert loads. A module job waits for its plan."""
        previous_plan = read_stored_plan(job.plan)
        device = spec.resources.trains_on(gang.gpus_per_worker)
        planned_pool = Gang.from_dict(json.loads(job.gang)).pool if job.gang else first_pool(spec, facts)
        if (
            previous_plan is not None
            and previous_plan.num_workers == gang.workers
            and (previous_plan.device, planned_pool) == (device, gang.pool)
        ):
            return previous_plan
        if isinstance(spec.model, ModuleModelSpec):
            return self._plan_of_module(spec, facts.of_pool(gang.pool), gang)
        load_skew = measured_load_skew(self._database, job.number) if job.attempt else None
        failure = ""
        for workers in range(gang.workers, spec.resources.min_num_workers - 1, -1):
            try:
                plan = plan_for(spec, facts.of_pool(gang.pool), PlanQuery(workers, load_skew=load_skew, to_run=True))
            except SpecError as error:
                failure = failure or str(error)
                continue
            assert plan is not None, "a cluster that holds the gang holds one worker"
            return plan
        return NeverFits(f"no plan fits this cluster: {failure}")

    def _plan_of_module(self, spec: JobSpec, facts: ClusterFacts, gang: Gang) -> Plan | MustWait | NeverFits:
        cluster, failure = planning_cluster(spec, facts), ""
        assert cluster is not None, "a cluster that holds the gang holds one worker"
        for workers in range(gang.workers, spec.resources.min_num_workers - 1, -1):
            try:
                plan = self._modules.begin(spec, module_cluster(spec, cluster, workers))
            except Unavailable as error:
                return MustWait(error.detail)
            except SpecError as error:
                failure = failure or str(error)
                continue
            return plan or MustWait(f"planning its module for {replace(gang, workers=workers)}")
        return NeverFits(f"no plan fits this cluster: {failure}")

    def _forget_all_but(self, active: Collection[JobRow]) -> None:
        numbers = {job.number for job in active}
        self._specs = {number: spec for number, spec in self._specs.items() if number in numbers}
        self._room = {number: room for number, room in self._room.items() if number in numbers}
