"""Laws of plans over random jobs and clusters: more resources are never slower, and one plan has one time."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.plan import Cluster, Degrees, LayoutSearch, plan_job
from moe.plan.candidate import RECOMPUTES, Candidate, Options
from moe.plan.query import PlanQuery
from moe.plan.request import PlanRequest
from moe.plan.search.spread import WITHIN_ERROR
from moe.plan.search.what_if import grid
from moe.plan.software import SOFTWARE
from moe.spec import SpecError
from tests.grid import PROFILE
from tests.unit.test_search_is_complete import Job, jobs
from tests.unit.test_verdict import language_job

_NEAR = 1.01
"""Of steps that differ by less, none is called the slower one."""


def fastest_s(job: Job, cluster: Cluster) -> float | None:
    """Seconds of the fastest layout's step; None where no layout fits."""
    try:
        search = LayoutSearch(job.spec, cluster, profile=job.profile)
        return search.ranking(job.workers, 1).fitting[0].step_s
    except SpecError:
        return None


TIMES = st.floats(1.0, 3.0)
ALSO_SLOW = pytest.mark.parametrize("run", ["quick", pytest.param("slow", marks=pytest.mark.slow)])
"""In the slow run once more, with more examples."""


@ALSO_SLOW
@given(jobs(), TIMES, TIMES, TIMES)
def test_more_memory_and_faster_links_are_never_slower(run: str, job: Job, memory: float, inner: float, outer: float):
    """Compared by the fastest layouts, with a tolerance of 1%."""
    before = fastest_s(job, job.cluster)
    larger = job.cluster.model_copy(update={"memory_bytes": int(job.cluster.memory_bytes * memory)})
    for cluster in (larger, job.cluster.with_links(inner, outer)):
        after = fastest_s(job, cluster)
        if before is not None:
            assert after is not None
            assert after <= before * _NEAR


RATES = st.tuples(TIMES, TIMES, TIMES, TIMES)


def chosen_s(job: Job, rates: tuple[float, ...]) -> float | None:
    """Seconds of the chosen plan's step on GPUs with multiples of the A100's rates for products, memory, links and
    network adapters."""
    of_a100 = {"bfloat16_flops_per_s": 312e12, "memory_bytes_per_s": 2e12, "link_bytes_per_s": 300e9,
               "across_nodes_bytes_per_s": 25e9}  # fmt: skip
    facts = {name: times * rate for (name, rate), times in zip(of_a100.items(), rates, strict=True)}
    cluster = Cluster.model_validate(
        {
            "num_nodes": job.cluster.num_nodes,
            "devices_per_node": job.cluster.devices_per_node,
            "device": {"name": "random", "memory_bytes": job.cluster.memory_bytes, **facts},
        }
    )
    try:
        return plan_job(job.spec, cluster, job.workers, profile=job.profile, top=1).predicted.step_s
    except SpecError:
        return None


@ALSO_SLOW
@given(jobs(), RATES, RATES)
def test_the_plan_chosen_on_better_hardware_is_never_slower(run: str, job: Job, rates: tuple, times: tuple) -> None:
    """With a tolerance of the error within which plans count as equal."""
    before = chosen_s(job, rates)
    after = chosen_s(job, tuple(rate * factor for rate, factor in zip(rates, times, strict=True)))
    if before is not None:
        assert after is not None
        assert after <= before * WITHIN_ERROR * _NEAR


@pytest.mark.slow
@ALSO_SLOW
@settings(max_examples=6 if PROFILE == "quick" else 30)
@given(jobs(), st.integers(2, 3))
def test_more_nodes_are_never_slower(run: str, job: Job, times: int) -> None:
    """Compared by the fastest layouts over all numbers of workers that the cluster has devices for, with a tolerance of
    1%."""

    def fastest_of_any(cluster: Cluster) -> float | None:
        seconds = [fastest_s(job._replace(workers=number), cluster) for number in range(1, cluster.num_devices + 1)]
        return min((time_s for time_s in seconds if time_s is not None), default=None)

    if (before := fastest_of_any(job.cluster)) is not None:
        after = fastest_of_any(job.cluster.model_copy(update={"num_nodes": times * job.cluster.num_nodes}))
        assert after is not None
        assert after <= before * _NEAR


OLMOE = language_job("olmoe-1b-7b", 16)


@pytest.mark.parametrize("name", SOFTWARE)
@pytest.mark.parametrize(
    "device", ["h100", *(pytest.param(device, marks=pytest.mark.slow) for device in ("b200", "gb200"))]
)
def test_no_software_runs_a_layout_faster_over_slower_links(device: str, name: str) -> None:
    """Over expert ranks of two nodes, tensor ranks, FSDP and pipeline stages."""
    cluster = Cluster(num_nodes=2, devices_per_node=8, device=device)
    candidates = [
        Candidate(Degrees(expert=16, data=1, fsdp=16), Options(micro_batch_groups=4)),
        Candidate(Degrees(expert=8, data=2, tensor=2, fsdp=8, expert_fsdp=2), Options(micro_batch_groups=8)),
        Candidate(Degrees(expert=4, data=2, pipeline=2), Options(num_micro_batches=8, sharding="optimizer")),
    ]
    slower = [
        LayoutSearch(OLMOE, cluster.with_links(*shares), profile="peer", software=SOFTWARE[name]).time
        for shares in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.1), (0.1, 0.01))
    ]
    for candidate in candidates:
        seconds = [time.step_s(candidate) for time in slower]
        assert seconds[0] <= min(seconds[1:])
        assert seconds[3] > 1.1 * seconds[0]
        assert slower[3].estimate(candidate).hidden_s <= seconds[3]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(jobs())
def test_a_plan_takes_as_long_wherever_it_is_told(job: Job) -> None:
    """As the only layout, as the first of several, and in a grid of variants."""
    try:
        plan = plan_job(job.spec, job.cluster, job.workers, top=1, profile=job.profile)
    except SpecError:
        return
    among = plan_job(job.spec, job.cluster, job.workers, top=7, profile=job.profile)
    request = PlanRequest(job.spec, query=PlanQuery(job.workers, profile=job.profile))
    (cell,) = grid(request, job.cluster, {"dtype": [job.spec.train.dtype]})
    assert cell.plan is not None
    for duplicate in (among, cell.plan):
        assert (duplicate.candidate, duplicate.predicted, duplicate.memory) == (
            plan.candidate, plan.predicted, plan.memory,
        )  # fmt: skip


@given(jobs(), st.data())
def test_recomputation_takes_no_more_memory_than_none_and_no_less_time(job: Job, data: st.DataObject) -> None:
    try:
        search = LayoutSearch(job.spec, job.cluster.model_copy(update={"memory_bytes": 1 << 50}), profile=job.profile)
        layouts = search.ranking(job.workers, 6).fitting
    except SpecError:
        return
    candidate = data.draw(st.sampled_from(layouts)).candidate
    plain = replace(candidate, options=replace(candidate.options, overlap=False))
    totals = [search.memory.total(plain.with_options(recompute=recompute)) for recompute in RECOMPUTES]
    seconds = [search.time.step_s(plain.with_options(recompute=recompute)) for recompute in RECOMPUTES]
    assert totals[2] <= totals[0]
    assert seconds == sorted(seconds)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [name for name, software in SOFTWARE.items() if software.extremes])
def test_a_choice_is_near_the_best_at_both_ends_or_says_that_they_disagree(name: str) -> None:
    """For a mixture of experts on 16 H100, priced by each software."""
    cluster = Cluster(num_nodes=2, devices_per_node=8, device="h100")
    plan = plan_job(OLMOE, cluster, software=name)  # type: ignore[arg-type]
    slowdowns = []
    for end in SOFTWARE[name].extremes:  # type: ignore[index]
        search = LayoutSearch(OLMOE, cluster, software=end)
        best = search.ranking(16, 1)
        fastest = (best.runnable or best.fitting)[0]
        slowdowns.append(search.time.step_s(plan.candidate) / fastest.step_s)
    assert max(slowdowns) <= 1.02 or any("disagree" in reason for reason in plan.reasons)
    assert any(name in reason for reason in plan.reasons)
