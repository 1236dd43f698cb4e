"""Plan of a job on a cluster, or on the best of its pools."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from moe.deprecation import renamed_arguments
from moe.plan.cluster.cluster import Cluster
from moe.plan.cluster.pools import Pool, Pools
from moe.plan.plan import Plan
from moe.plan.quantities import pluralize
from moe.plan.query import Goal, PlanQuery, plan_sort_key
from moe.plan.search.search import LayoutSearch
from moe.plan.search.smallest import MAX_NODES
from moe.plan.search.workers import Best, best_on, compare_objectives, describe_objective
from moe.spec import JobSpec, Problem, SpecError, spec_error

_CRITERIA: Mapping[Goal, str] = {"time": "the fastest", "cost": "the cheapest"}


@dataclass(frozen=True)
class _Offer:
    """Best plan of a job on one pool."""

    pool: str
    plan: Plan
    price_per_hour: float | None
    full_plan: Callable[[], Plan]
    """Returns the same plan with its reasons and the next best layouts."""

    def plan_sort_key(self, goal: Goal) -> tuple[bool, float, int]:
        return plan_sort_key(goal, self.plan, self.price_per_hour)


@renamed_arguments(on="cluster")
def plan_on_cluster(spec: JobSpec, cluster: Cluster | Pools, query: PlanQuery = PlanQuery()) -> Plan:
    """`plan_job` on a cluster, or on the best of its pools by the goal (default: fastest).

    A goal chooses the number of workers too. Unless `to_run`, a cluster with too few devices is extended. Raises
    SpecError if no pool holds the job, with the reason for each.
    """
    if isinstance(cluster, Pools):
        return _plan_pools(spec, cluster, query)
    if not query.to_run:
        # Workers beyond the cluster's devices need more nodes, whose links are slower than those within one.
        cluster = cluster.at_least(query.num_workers or spec.resources.min_num_workers)
    search = LayoutSearch.from_query(spec, cluster, query)
    if query.goal is None:
        return search.plan(query.num_workers, query.top, to_run=query.to_run)
    best = best_on(search, query)
    return _full_plan(search, _with_no_choice_reason(best, query.goal), query)


def _with_no_choice_reason(best: Best, goal: Goal | None) -> Best:
    if not best.why_no_choice:
        return best
    reason = f"goal {goal} had no choice: {best.why_no_choice}"
    return replace(best, why_workers=(*best.why_workers, reason))


def _plan_pools(spec: JobSpec, pools: Pools, query: PlanQuery) -> Plan:
    is_only = len(pools.pools) == 1

    def best(pool: Pool) -> _Offer:
        _check_num_devices(spec, pool.cluster, query.num_workers)
        search = LayoutSearch.from_query(spec, pool.cluster, query)
        choice = best_on(search, query)
        return _on_pool(pool, search, _with_no_choice_reason(choice, query.goal) if is_only else choice, query)

    goal = query.goal or "time"
    _check_prices(pools, goal)
    return _best_of(pools, best, query, lambda offer: offer.plan_sort_key(goal), _CRITERIA[goal])


def _on_pool(pool: Pool, search: LayoutSearch, best: Best, query: PlanQuery) -> _Offer:
    def full_plan() -> Plan:
        fewest = {"fewest": best.plan.fewest} if best.plan.fewest else {}
        return _full_plan(search, best, query).model_copy(update={"pool": pool.name, **fewest})

    return _Offer(pool.name, best.plan, pool.cluster.price_per_hour, full_plan)


def fit_pools(spec: JobSpec, pools: Pools, query: PlanQuery = PlanQuery()) -> tuple[Plan, Cluster]:
    """Return (plan, smallest cluster of a pool's kind that can run the job, one worker per device), for the best
    pool by the goal (default: fewest devices). Raises SpecError if no kind holds it."""
    smallest: dict[str, Cluster] = {}

    def best(pool: Pool) -> _Offer:
        fewest = LayoutSearch.from_query(spec, pool.cluster, query).fewest()
        workers = fewest.to_run or (None if query.to_run else fewest.in_any_layout)
        if workers is None:
            raise SpecError(no_cluster_fits())
        smallest[pool.name] = pool.cluster.sized_for(workers)
        search = LayoutSearch.from_query(spec, smallest[pool.name], query)
        plan = search.best_of(workers, search.refined_ranking(workers, query.top, to_run=query.to_run))
        plan = plan.model_copy(update={"fewest": fewest})
        verb = "hold" if plan.not_yet else "run"
        reason = f"{pluralize(workers, 'worker')}: the fewest of this kind that {verb} the job"
        return _on_pool(pool, search, Best(plan, (reason,)), query)

    def rank(offer: _Offer) -> tuple[bool, float, int]:
        plan = offer.plan
        return (bool(plan.not_yet), plan.num_workers, 0) if query.goal is None else offer.plan_sort_key(query.goal)

    _check_prices(pools, query.goal)
    criterion = "the fewest devices" if query.goal is None else _CRITERIA[query.goal]
    plan = _best_of(pools, best, query, rank, criterion)
    assert plan.pool is not None
    return plan, smallest[plan.pool]


def no_cluster_fits() -> Problem:
    """Problem of a job that no number of nodes holds."""
    return Problem("does_not_fit", "resources", f"{MAX_NODES:,} nodes", "cannot hold the model",
                   "use devices with more memory, smaller groups or a smaller model")  # fmt: skip


def _best_of(
    pools: Pools,
    best: Callable[[Pool], _Offer],
    query: PlanQuery,
    rank: Callable[[_Offer], tuple[bool, float, int]],
    criterion: str,
) -> Plan:
    """Plan of the best offer by `rank`, with reasons about the others. Raises SpecError if there is none."""
    offers, refusals, goal = [], {}, query.goal or "time"
    for pool in pools.pools:
        try:
            offers.append(best(pool))
        except SpecError as error:
            refusals[pool.name] = error
    if not offers:
        raise SpecError(
            replace(problem, path=f"pool {name}: {problem.path}")
            for name, error in refusals.items()
            for problem in error.problems
        )
    first = min(offers, key=rank)
    reasons = [_choice_line(first, criterion, len(offers), len(pools.pools), goal)]
    reasons += [_alternative_line(offer, first, goal) for offer in offers if offer is not first]
    reasons += [f"pool {name} cannot hold it: {error.problems[0]}" for name, error in refusals.items()]
    plan = first.full_plan()
    return plan.model_copy(update={"reasons": (*reasons, *plan.reasons)})


def _full_plan(search: LayoutSearch, best: Best, query: PlanQuery) -> Plan:
    workers = best.plan.num_workers
    return search.plan(workers, query.top, to_run=query.to_run, why_workers=best.why_workers)


def _choice_line(offer: _Offer, criterion: str, fitting: int, num_pools: int, goal: Goal) -> str:
    if fitting == 1:
        reason = "the only pool" if num_pools == 1 else f"the only one of {num_pools} pools that holds it"
        return f"pool {offer.pool}: {reason}"
    words = f"of {fitting} pools that hold it, {describe_objective(offer.plan, goal)}"
    return f"pool {offer.pool}: {criterion} {words}"


def _alternative_line(offer: _Offer, first: _Offer, goal: Goal) -> str:
    plan, than = offer.plan, first.plan
    comparison = compare_objectives(offer.plan_sort_key(goal)[1], first.plan_sort_key(goal)[1], goal)
    caveat = ", but cannot be run yet" if plan.not_yet and not than.not_yet else ""
    return (
        f"pool {offer.pool}: {pluralize(plan.num_workers, 'worker')} would take {describe_objective(plan, goal)}, "
        f"{comparison}{caveat}"
    )


def _check_num_devices(spec: JobSpec, cluster: Cluster, num_workers: int | None) -> None:
    """Raise SpecError if the pool has too few devices."""
    num_required = spec.resources.min_num_workers if num_workers is None else num_workers
    if num_required > cluster.num_devices:
        place = "resources" if num_workers is None else "num_workers"
        raise spec_error("out_of_range", place, pluralize(num_required, "worker"),
                         f"must be at most the number of devices (={cluster.num_devices})",
                         "use a larger pool, or fewer workers")  # fmt: skip


def _check_prices(pools: Pools, goal: Goal | None) -> None:
    if goal != "cost" or len(pools.pools) == 1:
        return
    if problems := [
        Problem("missing", f"cluster.pools[{index}].price_per_hour", None,
                f"is required for pool {pool.name}, since pools are compared by cost", "add it, or use goal time")
        for index, pool in enumerate(pools.pools)
        if pool.cluster.price_per_hour is None
    ]:  # fmt: skip
        raise SpecError(problems)
