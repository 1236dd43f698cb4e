"""Plans of jobs on the current cluster: before a job is queued, or on request."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from moe.plan import Plan, PlanQuery, PlanRequest
from moe.plan.notes import add_notes
from moe.spec import JobSpec, ModuleModelSpec, SpecError, spec_error
from moe.tasks.build import build_task
from moe.tasks.module.code import check_allowed
from moe.tasks.requirements import training_requirements
from service.control.errors import Unavailable
from service.control.jobs.data_roots import DataRoots
from service.control.jobs.roots import StorageRoots
from service.control.launcher.launcher import ClusterFacts, LauncherUnavailable
from service.control.scheduling.admission import NeverFits, admit, fingerprint
from service.control.scheduling.cluster_watch import ClusterWatch
from service.control.scheduling.module_plans import BEING_PLANNED, ModulePlans
from service.control.scheduling.planning import check_degrees, module_cluster, plan_for, plan_on, planning_cluster
from service.control.store.clock import now_us
from service.tracker.places import TrackerPlaces
from service.wire.states import WAITS

FACTS_AGE_S = 5.0


@dataclass(frozen=True)
class PlanForecast:
    """Plan of a job before it starts, and whether the cluster could ever hold it."""

    plan: Plan | None
    reason: str
    unfit_for: str | None = None
    unreachable_since: int | None = None


class JobPlans:
    """Plans jobs, and rejects those that could not run."""

    def __init__(
        self,
        watch: ClusterWatch,
        storage_roots: StorageRoots,
        data_roots: DataRoots,
        *,
        allowed_code: tuple[str, ...],
        modules: ModulePlans,
        trackers: TrackerPlaces,
    ) -> None:
        self._watch, self._storage_roots, self._data_roots = watch, storage_roots, data_roots
        self._allowed_code, self._modules, self._trackers = allowed_code, modules, trackers

    def check(self, spec: JobSpec) -> Sequence[str]:
        """Return warnings about a job. Raises SpecError if no cluster could run it, or this service may not run it."""
        check_allowed(spec, self._allowed_code)
        check_degrees(spec)
        self._watch.check(spec.resources)
        self._trackers.check(spec.track)
        return build_task(spec).check_data(self._data_roots.of(spec))

    def forecast(self, spec: JobSpec) -> PlanForecast:
        """Plan a job that is about to be queued. A user's module is planned in the background; raises SpecError if
        that failed recently."""
        try:
            facts = self._watch.facts_for(spec.resources, FACTS_AGE_S)
        except LauncherUnavailable as error:
            return PlanForecast(None, f"{WAITS}; {self._watch.describe_outage(error)}", unreachable_since=now_us())
        admission = admit(spec.resources, facts, gangs={})
        if isinstance(admission, NeverFits):
            return PlanForecast(None, admission.reason, fingerprint(facts))
        if isinstance(spec.model, ModuleModelSpec):
            return self._forecast_module(spec, facts)
        try:
            return PlanForecast(plan_for(spec, facts), WAITS)
        except SpecError as error:
            return PlanForecast(None, f"no plan fits this cluster: {error}", fingerprint(facts))

    def _forecast_module(self, spec: JobSpec, facts: ClusterFacts) -> PlanForecast:
        plan, cluster = None, planning_cluster(spec, facts)
        with suppress(Unavailable):  # too many are being planned: started when its turn comes
            if cluster is not None:
                plan = self._modules.begin(spec, module_cluster(spec, cluster))
        return PlanForecast(plan, WAITS if plan else f"{WAITS}; {BEING_PLANNED}")

    def make_plan(self, request: PlanRequest) -> Plan:
        """Make the plan that `submit` would make now, or a plan for the request's cluster; store nothing. Jobs that
        cannot run yet are planned too; a job without its model's weights gets a note.

        Raises LauncherUnavailable, and SpecError, also if this cluster can never hold the job.
        """
        spec, cluster, query = request.spec, request.cluster, request.query
        if query.goal is not None and isinstance(spec.model, ModuleModelSpec):
            rule = "does not apply to the choice of a module's workers"
            raise spec_error("not_applicable", "goal", query.goal, rule, "omit it")
        if cluster is not None:
            check_allowed(spec, self._allowed_code)
            if isinstance(spec.model, ModuleModelSpec):
                return self._modules.wait_for_plan(spec, module_cluster(spec, cluster, query.num_workers))
            plan = plan_on(spec, cluster, query)
            return add_notes(plan, spec, training_requirements(spec, self._data_roots.of(spec)))
        self._storage_roots.job_folder(spec.storage, "job")  # rejects storage outside the roots
        if missing := training_requirements(spec, self._data_roots.of(spec)):
            check_degrees(spec)
        else:
            self.check(spec)
        facts = self._watch.facts_for(spec.resources, FACTS_AGE_S)
        admission = admit(spec.resources, facts, gangs={})
        cluster_plan = (
            None if isinstance(admission, NeverFits) else self._plan_on(spec, facts, replace(query, to_run=True))
        )
        if cluster_plan is None:
            assert isinstance(admission, NeverFits)
            workers = spec.resources.min_num_workers
            raise spec_error("does_not_fit", "resources", f"{workers} workers", admission.reason, "request less")
        return add_notes(cluster_plan, spec, missing)

    def _plan_on(self, spec: JobSpec, facts: ClusterFacts, query: PlanQuery) -> Plan | None:
        """Plan on this cluster; None if it holds no worker. Raises SpecError, Unavailable."""
        if not isinstance(spec.model, ModuleModelSpec):
            return plan_for(spec, facts, query)
        cluster = planning_cluster(spec, facts)
        return (
            None
            if cluster is None
            else self._modules.wait_for_plan(spec, module_cluster(spec, cluster, query.num_workers))
        )
