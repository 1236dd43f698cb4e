"""Number of workers by a goal."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import lcm

from moe.plan.money import format_amount
from moe.plan.plan import Plan
from moe.plan.quantities import format_seconds, pluralize
from moe.plan.query import Goal, PlanQuery, evaluate_objective, plan_sort_key
from moe.plan.search.choices import LayoutChoices, divisors, steps
from moe.plan.search.ranking import Ranking
from moe.plan.search.search import LayoutSearch
from moe.plan.speed import describe_speed, format_change
from moe.spec.errors import SpecError

_TRY_ALL_UP_TO = 16
"""Every number of workers up to this one is tried."""


@dataclass(frozen=True)
class Best:
    """Plan on one kind of nodes, without reasons, and why it has this many workers."""

    plan: Plan
    why_workers: tuple[str, ...]
    why_no_choice: str = ""
    """Why the goal had no choice, if so."""


def best_on(search: LayoutSearch, query: PlanQuery) -> Best:
    """Best plan by the goal on the search's cluster, for the requested number of workers or the job's range. Raises
    SpecError if there is none."""
    num_workers, goal = query.num_workers, query.goal
    if goal is not None and num_workers is None and (numbers := _numbers(search)):
        return _best_of(search, numbers, goal, query)
    workers, reasons = search.workers(num_workers)
    if num_workers is None and (largest := largest_divisible(search, workers)) != workers:
        workers, reasons = largest, [f"{pluralize(largest, 'worker')}: the most with valid degrees"]
    plan = search.best_of(workers, search.refined_ranking(workers, query.top, to_run=query.to_run))
    return Best(plan, tuple(reasons), "" if goal is None else _single_number_reason(search, num_workers))


def numbers_of_workers(min_workers: int, max_workers: int, per_node: int, multiple: int = 1) -> list[int]:
    """Numbers to try: each to 16, then four per doubling of whole nodes (or within a larger node), and
    `max_workers`; all multiples of `multiple`."""
    node_multiple = lcm(per_node, multiple)
    numbers = {
        *range(1, _TRY_ALL_UP_TO + 1),
        *(multiple * step for step in steps(per_node // multiple)),
        *(node_multiple * step for step in steps(max_workers // node_multiple)),
        max_workers - max_workers % multiple,
    }
    return sorted(number for number in numbers if min_workers <= number <= max_workers and number % multiple == 0)


def _range(search: LayoutSearch) -> tuple[int, int]:
    resources = search.spec.resources
    min_workers = resources.min_num_workers
    return min_workers, max(min_workers, min(resources.max_num_workers, search.cluster.num_devices))


def _numbers(search: LayoutSearch) -> list[int]:
    """Numbers of workers to try; empty if there is only one."""
    (min_workers, max_workers), multiple = (
        _range(search),
        LayoutChoices(search.spec, search.cluster, search.profile).multiple,
    )
    return (
        []
        if min_workers == max_workers
        else numbers_of_workers(min_workers, max_workers, search.cluster.devices_per_node, multiple)
    )


def largest_divisible(search: LayoutSearch, workers: int) -> int:
    """The most workers, up to `workers`, that the requested degrees divide; `workers` if below the job's range."""
    spec, parallel = search.spec, search.spec.parallel
    multiple = LayoutChoices(spec, search.cluster, search.profile).multiple
    largest = workers - workers % multiple
    if parallel.data is not None and parallel.expert is None:  # the rest is a degree of experts
        ranks = parallel.data * (parallel.expert_tensor or 1) * (parallel.pipeline or 1)
        num_experts = spec.model.moe.num_experts if spec.model.moe else 1
        numbers = [ranks * degree for degree in divisors(num_experts, workers // ranks)]
        largest = max((number for number in numbers if number % multiple == 0), default=0)
    return largest if largest >= spec.resources.min_num_workers else workers


def _single_number_reason(search: LayoutSearch, num_workers: int | None) -> str:
    resources = search.spec.resources
    if num_workers is not None:
        return "it was requested"
    if resources.min_num_workers == resources.max_num_workers:
        return "the job sets it; resources.min_workers and max_workers would give a range"
    return f"{pluralize(search.cluster.num_devices, 'device')} leave one number of the job's range"


@dataclass(frozen=True)
class _WorkersResult:
    """A number of workers, with ranking and plan as far as computed."""

    workers: int
    ranking: Ranking | None = None
    plan: Plan | None = None


def _best_of(search: LayoutSearch, numbers: list[int], goal: Goal, query: PlanQuery) -> Best:
    """Best of these numbers of workers. Best-first: each is evaluated in stages (lower bound, fastest layout, choice
    under both ends of the spread), while it may be best or second best."""
    refusals: dict[int, SpecError] = {}
    queue = list(_bounds(search, numbers, goal, refusals))
    heapify(queue)
    best: list[Plan] = []
    while queue and len(best) < 2:
        *_, progress = heappop(queue)
        if progress.plan is not None:
            best.append(progress.plan)
            continue
        try:
            heappush(queue, _evaluate_next(search, progress, goal, query))
        except SpecError as error:
            refusals[progress.workers] = error
    if not best:
        raise refusals[max(refusals)]
    return Best(best[0], tuple(_reasons(search, best, goal, numbers, refusals)))


_Entry = tuple[bool, float, int, int, _WorkersResult]
"""(whether it cannot be run, lower bound of the objective, workers, stages evaluated, result)."""


def _bounds(
    search: LayoutSearch, numbers: Iterable[int], goal: Goal, refusals: dict[int, SpecError]
) -> Iterator[_Entry]:
    for workers in numbers:
        try:
            yield (
                False,
                evaluate_objective(goal, search.cluster.billed_devices(workers), search.bound_s(workers)),
                workers,
                0,
                _WorkersResult(workers),
            )
        except SpecError as error:
            refusals[workers] = error


def _evaluate_next(search: LayoutSearch, progress: _WorkersResult, goal: Goal, query: PlanQuery) -> _Entry:
    """Evaluate the next stage. Raises SpecError if no layout exists or fits."""
    workers = progress.workers
    if progress.ranking is None:
        ranking = search.refined_ranking(workers, query.top, to_run=query.to_run)
        fastest = (ranking.runnable or ranking.fitting)[0]
        objective = evaluate_objective(goal, search.cluster.billed_devices(workers), fastest.step_s)
        return not ranking.runnable, objective, workers, 1, _WorkersResult(workers, ranking)
    plan = search.best_of(workers, progress.ranking)
    return *plan_sort_key(goal, plan), 2, _WorkersResult(workers, progress.ranking, plan)


def _reasons(
    search: LayoutSearch, best: list[Plan], goal: Goal, numbers: list[int], refusals: dict[int, SpecError]
) -> Iterator[str]:
    first, runners_up = best[0], best[1:]
    min_workers, max_workers = _range(search)
    criterion = {"time": "the fastest step", "cost": "the cheapest step"}[goal]
    yield (
        f"{pluralize(first.num_workers, 'worker')}: {criterion} of {min_workers:,} to {max_workers:,}, "
        f"{describe_objective(first, goal)}, for goal {goal}; evaluated {_format_ranges(numbers)}"
    )
    for runner_up in runners_up:
        behind = compare_objectives(objective_of(runner_up, goal), objective_of(first, goal), goal)
        if runner_up.not_yet and not first.not_yet:
            behind = "but cannot be run yet"
        yield (
            f"the next best, {pluralize(runner_up.num_workers, 'worker')}, would take "
            f"{describe_objective(runner_up, goal)}, {behind}"
        )
    if not runners_up:
        yield f"no other number of workers from {min_workers:,} to {max_workers:,} has a layout that fits"
    elif refusals:
        yield f"no layout fits {_format_ranges(sorted(refusals))} {'worker' if list(refusals) == [1] else 'workers'}"


def objective_of(plan: Plan, goal: Goal) -> float:
    """Objective of a plan."""
    return evaluate_objective(goal, plan.billed_devices, plan.predicted.step_s)


def compare_objectives(objective: float, than: float, goal: Goal) -> str:
    """Compare objectives: speeds for goal time, otherwise `12.3% more expensive`."""
    if goal == "time":
        return describe_speed(objective, than)
    excess = objective / than - 1
    return f"{format_change(excess)} {'more expensive' if excess > 0 else 'cheaper'}" if excess else "as expensive"


def describe_objective(plan: Plan, goal: Goal) -> str:
    """Format `1.2 s`, or `9.6 device-seconds (1.2 s on 8, 0.41 per million tokens)`."""
    step = format_seconds(plan.predicted.step_s)
    money = "" if plan.money is None else f", {format_amount(plan.money.per_million_tokens)} per million tokens"
    if goal == "time":
        return step + money
    objective = objective_of(plan, goal)
    objective_text = f"{objective:,.0f}" if objective >= 100 else f"{objective:.3g}"
    return f"{objective_text} device-seconds ({step} on {plan.billed_devices:,}{money})"


def _format_ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = (
        f"{run[0]:,} to {run[-1]:,}" if len(run) > 2 else ", ".join(f"{number:,}" for number in run) for run in runs
    )
    return ", ".join(texts)
