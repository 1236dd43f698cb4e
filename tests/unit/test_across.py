"""Plans whose pipeline stages lie on several pools, beside trying every split, layout and dealing."""

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe.plan import Cluster, LayoutSearch, Pools, cluster_of, plan_anywhere, plan_job
from moe.plan.candidate import Candidate
from moe.plan.cost.dealing import Dealer
from moe.plan.cost.memory import ALLOWANCE
from moe.plan.cost.time import Hops
from moe.plan.cost.units import units
from moe.plan.goal import Goal
from moe.plan.plan import Plan
from moe.plan.plan_file import made_for
from moe.plan.search.across import Across, PoolSplit, narrowest
from moe.plan.search.choices import LayoutChoices
from moe.plan.search.pools import How
from moe.spec import JobSpec, SpecError
from tests.refusals import refused_for
from tests.unit.searched_shape import of_shape
from tests.unit.test_dealing import every_way
from tests.unit.test_search_is_complete import LANGUAGE, parsed

BETWEEN = {"bytes_per_s": 2e10, "latency_s": 1e-5}
DEVICES = ["h100", "a100-80", "b200"]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[JobSpec, Pools]:
    """A job, and two or three pools that hold it alone or do not."""
    parallel = {}
    if draw(st.booleans()):
        parallel["recompute"] = draw(st.sampled_from(["none", "selective", "full"]))
    if draw(st.booleans()):
        parallel["pipeline"] = draw(st.integers(2, 4))
    least = draw(st.integers(2, 5))
    spec = parsed(
        {
            "model": draw(LANGUAGE),
            "data": {"corpus": "synthetic", "max_tokens": 8192},
            "train": {"num_steps": 1, "batch_tokens": draw(st.sampled_from([1, 3, 8])) * 8192,
                      "dtype": draw(st.sampled_from(["float32", "bfloat16"]))},
            "resources": {"min_workers": least, "max_workers": least + draw(st.integers(0, 6))},
            "parallel": parallel,
        }
    )  # fmt: skip
    state = 16 * spec.model.num_parameters()
    pools = []
    for number in range(draw(st.integers(2, 3))):
        nodes, each = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4]))
        share = 2 ** draw(st.floats(-1, 4)) / (nodes * each) / (1 - ALLOWANCE)
        pools.append(
            {"name": str(number), "num_nodes": nodes, "devices_per_node": each,
             "device": draw(st.sampled_from(DEVICES)), "memory_bytes": int(state * share) + (1 << 28),
             "price_per_hour": draw(st.floats(1, 4))}
        )  # fmt: skip
    return spec, joined(*pools)


def joined(*pools: dict[str, Any]) -> Pools:
    found = cluster_of({"pools": list(pools), "between": BETWEEN})
    assert isinstance(found, Pools)
    return found


def across_of(spec: JobSpec, pools: Pools) -> Across:
    assert pools.between is not None
    searches = [LayoutSearch(spec, pool.cluster, profile="peer") for pool in pools.pools]
    return Across(spec, pools.pools, searches, pools.between)


class Slow:
    """Steps on a split by trying every dealing."""

    def __init__(self, spec: JobSpec, pools: Pools, split: PoolSplit) -> None:
        self.clusters = [pools.pools[pool].cluster for pool in split.pools]
        asked = spec.parallel.model_copy(update={"virtual_stages": 1, "pipeline": split.pipeline})
        self.choices = LayoutChoices(spec.model_copy(update={"parallel": asked}), narrowest(self.clusters))
        self.split, self.between = split, pools.between
        self.searches = [LayoutSearch(spec, pool.cluster, profile="peer") for pool in pools.pools]
        first = self.searches[0]
        self.dealer = Dealer(units(spec.model, first.profile, spec.train.freeze), split.of_stages)

    def candidates(self) -> Iterator[Candidate]:
        for shape in self.choices.shapes(self.split.num_workers):
            if self.choices.fits_nodes(shape):
                yield from of_shape(self.choices, shape)

    def of_dealings_s(self, candidate: Candidate) -> list[float]:
        """In all dealings whose slowest stage is as fast as in any that fits."""
        found: list[tuple[float, float]] = []
        hops, pools = [], self.split.of_stages
        for one, other in pairwise(pools):
            time = self.searches[one].time
            assert self.between is not None
            across = self.between.latency_s + time.hop_bytes(candidate) / self.between.bytes_per_s
            hops.append(time.hop_s(candidate) if one == other else across)
        for ends in every_way(len(self.dealer.units), len(pools)):
            stages = self.dealer.stages(ends)
            each = [(self.searches[pool], stage) for pool, stage in zip(pools, stages, strict=True)]
            if all(
                (of := search.memory.of_stage(stage, candidate)).total <= of.limit for search, stage in each
            ):
                seconds = [
                    sum(count * search.time.unit_s(unit, candidate) for unit, count in stage.units)
                    for search, stage in each
                ]
                one_s, taken = max(seconds), Hops(max(hops), sum(hops))
                steps = [
                    search.time.step_on(candidate, one_s, taken, search.time.end_of(candidate, stage, own_s))
                    for (search, stage), own_s in zip(each, seconds, strict=True)
                ]
                found.append((one_s, max(steps)))
        fastest_s = min(found, default=(inf, inf))[0]
        return [step_s for one_s, step_s in found if one_s <= fastest_s * (1 + 1e-12)]


def least_efforts(spec: JobSpec, pools: Pools, goal: Goal) -> tuple[float, float]:
    """(the least, the most) effort of the best: dealings whose slowest stage is as fast may end otherwise."""
    across = across_of(spec, pools)
    least, most, tried = inf, inf, 0
    for split in across.splits(None, goal):
        slow = Slow(spec, pools, split)
        for candidate in slow.candidates():
            assume((tried := tried + 1) < 1000)
            steps = slow.of_dealings_s(candidate) or [inf]
            least = min(least, across.effort(split, min(steps), goal))
            most = min(most, across.effort(split, max(steps), goal))
    return least, most


def assert_best(spec: JobSpec, pools: Pools, goal: Goal) -> None:
    least, most = least_efforts(spec, pools, goal)
    across = across_of(spec, pools)
    found = across.fastest(None, goal)
    assert (found is None) == (least == inf)
    if found is None:
        return
    assert least * (1 - 1e-6) <= across.effort(found.split, found.step_s, goal) <= most * (1 + 1e-6)
    plan = across.plan(found, 3)
    assert_holds(plan)


def assert_holds(plan: Plan) -> None:
    """What a plan across pools says of its stages agrees with itself."""
    assert len(plan.stages) == plan.degrees.pipeline
    assert all(stage.memory_bytes <= stage.limit_bytes for stage in plan.stages)
    fullest = max(plan.stages, key=lambda stage: stage.memory_bytes / stage.limit_bytes)
    assert (plan.memory.total, plan.memory.limit) == (fullest.memory_bytes, fullest.limit_bytes)
    assert len(plan.pools) > 1
    slowest_s = max(stage.micro_batch_s for stage in plan.stages)
    assert slowest_s * (plan.options.num_micro_batches + len(plan.stages) - 1) <= plan.predicted.step_s * (
        1 + 1e-5
    )
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


@settings(max_examples=15, deadline=None)
@given(jobs(), st.sampled_from(["time", "cost"]))
def test_the_best_is_that_of_trying_every_split_layout_and_dealing(
    job: tuple[JobSpec, Pools], goal: Goal
) -> None:
    assert_best(*job, goal)


@pytest.mark.slow
@given(jobs(), st.sampled_from(["time", "cost"]))
def test_the_best_is_that_of_trying_every_split_layout_and_dealing_of_any(
    job: tuple[JobSpec, Pools], goal: Goal
) -> None:
    assert_best(*job, goal)


MIXTRAL = JobSpec.parse(
    {
        "model": {"preset": "mixtral-8x7b"},
        "data": {"corpus": "synthetic", "max_tokens": 4096},
        "train": {"num_steps": 10, "batch_tokens": 1 << 20, "dtype": "bfloat16"},
        "resources": {"min_workers": 1, "max_workers": 64},
        "parallel": {"expert": 8, "tensor": 1, "context": 1},
    }
)
OLD = {"name": "old", "num_nodes": 4, "devices_per_node": 8, "device": "a100-80", "price_per_hour": 1.5}
NEW = {"name": "new", "num_nodes": 2, "devices_per_node": 8, "device": "h100", "price_per_hour": 3.25}
PEER = How(profile="peer")


def test_two_pools_of_one_kind_are_as_fast_as_one_cluster_of_both() -> None:
    """Or faster, where units are dealt better than as even as they come; but for the end of a stage that is not the
    slowest, which no stage of one kind is priced by."""
    one = Cluster(num_nodes=4, devices_per_node=8, device="h100")
    half = {"num_nodes": 2, "devices_per_node": 8, "device": "h100"}
    between = {"bytes_per_s": one.traits.across_nodes_bytes_per_s, "latency_s": one.traits.across_latency_s}
    both = cluster_of({"pools": [{"name": "a", **half}, {"name": "b", **half}], "between": between})
    assert isinstance(both, Pools)
    search, compared = LayoutSearch(MIXTRAL, one, profile="peer"), 0
    for split in across_of(MIXTRAL, both).splits(32):
        slow = Slow(MIXTRAL, both, split)
        on = across_of(MIXTRAL, both).on(split)
        for candidate in list(slow.candidates())[::29]:
            if search.memory.total(candidate) <= one.memory_bytes:
                assert on.memory.fits(candidate)
                assert on.time.step_s(candidate) <= search.time.step_s(candidate) * 1.005
                compared += 1
    assert compared > 20


def test_a_job_lies_across_pools_where_that_is_faster() -> None:
    plan = plan_anywhere(MIXTRAL, joined(OLD, NEW), how=PEER)
    assert (plan.pool, plan.pools, plan.device_type) == (None, ("old", "new"), "a100-80 and h100")
    assert_holds(plan)
    for pool in (OLD, NEW):
        alone = plan_job(MIXTRAL, one_of(pool), profile="peer")
        assert plan.predicted.step_s < alone.predicted.step_s
    slow, fast = plan.stages[0], plan.stages[-1]
    assert slow.units < fast.units / 2, "an H100 is more than twice as fast"
    assert "stages on several pools" in plan.not_yet
    assert plan.money is not None
    on = {stage.pool: sum(each.pool == stage.pool for each in plan.stages) for stage in plan.stages}
    workers = plan.degrees.stage_workers
    assert plan.money.per_hour == pytest.approx(workers * (1.5 * on["old"] + 3.25 * on["new"]))
    told = "\n".join(plan.reasons)
    for said in ("pools old and new: the fastest of 3 choices", "pool old: 32 workers would take",
                 "pool new: 16 workers would take", "on pool new, 16 workers each: "):  # fmt: skip
        assert said in told
    assert plan.made_for is not None
    assert plan.made_for.spec == made_for(MIXTRAL, one_of(OLD)).spec
    prices = joined({**OLD, "price_per_hour": 9.0}, NEW)
    assert plan_anywhere(MIXTRAL, prices, how=PEER).made_for == plan.made_for
    closer = cluster_of({"pools": [OLD, NEW], "between": {**BETWEEN, "latency_s": 2e-5}})
    assert plan_anywhere(MIXTRAL, closer, how=PEER).made_for != plan.made_for


def one_of(pool: dict[str, Any]) -> Cluster:
    return Cluster.model_validate({key: value for key, value in pool.items() if key != "name"})


def test_it_lies_on_one_where_nothing_joins_them_or_layouts_are_to_be_run() -> None:
    apart = cluster_of({"pools": [OLD, NEW]})
    plan = plan_anywhere(MIXTRAL, apart, how=PEER)
    assert (plan.pool, plan.stages) == ("new", ())
    assert "stages" not in plan.model_dump()
    assert "several pools" not in "\n".join(plan.reasons)
    spec = JobSpec.parse(
        {"model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"}, "train": {"num_steps": 1},
         "resources": {"num_workers": 2}}
    )  # fmt: skip
    small = joined({**OLD, "num_nodes": 1}, {**NEW, "num_nodes": 1})
    assert plan_anywhere(spec, small).pool is not None, "what can be run comes first"
    assert plan_anywhere(spec, small, how=How(to_run=True)).pool is not None


def test_more_workers_than_any_pool_has_lie_across_several() -> None:
    """Of three pools, those that are the fastest together."""
    few = [
        {**OLD, "num_nodes": 1},
        {**NEW, "num_nodes": 1},
        {**NEW, "name": "newer", "num_nodes": 1, "device": "b200"},
    ]
    plan = plan_anywhere(MIXTRAL, joined(*few), 24, how=PEER)
    assert sorted(plan.pools) == ["new", "newer", "old"]
    assert plan.num_workers == 24
    assert plan.reasons[0].endswith("no pool holds it alone")
    assert "pool old cannot hold it: num_workers (='24 workers') must be at most" in "\n".join(plan.reasons)
    plan = plan_anywhere(MIXTRAL, joined(*few), 16, how=PEER)
    assert sorted(plan.pools) == ["new", "newer"]


def test_what_no_pools_hold_together_is_refused_by_each() -> None:
    tiny = [{**pool, "memory_bytes": 1 << 30} for pool in (OLD, NEW)]
    with refused_for(
        [
            ("does_not_fit", "pool old: resources", "32 workers"),
            ("does_not_fit", "pool new: resources", "16 workers"),
        ]
    ):
        plan_anywhere(MIXTRAL, joined(*tiny), how=PEER)


@pytest.mark.parametrize(
    ("between", "said"),
    [
        ({"bytes_per_s": 1e10}, "cluster.between.latency_s is required"),
        ({"bytes_per_s": 0, "latency_s": 0.0}, r"cluster.between.bytes_per_s \(=0\) must be"),
        ({"bytes_per_s": 1e10, "latency_s": 0.0, "rails": True}, "cluster.between.rails"),
        ("fast", r"cluster.between \(='fast'\)"),
    ],
)
def test_links_between_pools_that_are_none(between: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        cluster_of({"pools": [OLD, NEW], "between": between})


def test_the_longest_end_of_any_stage_comes_behind_the_step() -> None:
    """Also where that stage is not the slowest: over slow links between nodes gradients take longest."""
    slow_links = {**OLD, "across_share": 0.05}
    spec = MIXTRAL.model_copy(update={"train": MIXTRAL.train.model_copy(update={"batch_tokens": 64 * 4096})})
    pools = joined(slow_links, NEW)
    across = across_of(spec, pools)
    found = across.fastest(None, "time")
    assert found is not None
    on = across.on(found.split)
    dealt = on.time.deal_units(found.candidate)
    ends = [
        search_of(spec, pools, stage.pool).time.end_of(found.candidate, units, one_s).total_s
        for stage, units, one_s in zip(
            across.plan(found, 1).stages, dealt.stages, dealt.micro_batch_s, strict=True
        )
    ]
    predicted = on.time.estimate(found.candidate)
    assert predicted.all_reduce_s + predicted.optimizer_s == pytest.approx(max(ends), rel=1e-5)


def search_of(spec: JobSpec, pools: Pools, name: str) -> LayoutSearch:
    return LayoutSearch(spec, pools.cluster(name), profile="peer")


CPU = {"name": "cpu", "num_nodes": 1, "devices_per_node": 2, "device": "cpu", "price_per_hour": 0.1}
TPU = {"num_nodes": 64, "devices_per_node": 8, "device": "tpu-v3", "price_per_hour": 1.0}


@pytest.mark.parametrize("others", [[CPU], [{**TPU, "name": str(number)} for number in range(3)]])
def test_pools_of_other_kinds_change_nothing(others: list[dict[str, Any]]) -> None:
    """Neither what is looked at nor what software says of its spread."""
    alone = plan_anywhere(MIXTRAL, joined(OLD, NEW), how=PEER)
    among = plan_anywhere(MIXTRAL, joined(*others, OLD, NEW), how=PEER)
    assert (among.candidate, among.stages, among.predicted) == (
        alone.candidate,
        alone.stages,
        alone.predicted,
    )
    (told,) = (reason for reason in alone.reasons if reason.startswith("priced by"))
    assert "at the ends of its spread" in told
    assert told in among.reasons


def test_a_goal_looks_at_fewer_stages_too() -> None:
    """Half of what there is may be cheaper: no pipeline that is asked for is cheaper than what is chosen."""
    pools = joined({**OLD, "num_nodes": 8}, {**NEW, "num_nodes": 1})
    cheapest = How("cost", profile="peer")

    def per_step(pipeline: int | None) -> float:
        parallel = MIXTRAL.parallel.model_copy(update={"pipeline": pipeline})
        plan = plan_anywhere(MIXTRAL.model_copy(update={"parallel": parallel}), pools, how=cheapest)
        assert plan.money is not None
        return plan.money.per_step

    free = per_step(None)
    assert all(free <= per_step(pipeline) * (1 + 1e-5) for pipeline in (1, 2, 3, 4))


@pytest.mark.parametrize("asked", [{"virtual_stages": 2}, {"overlap": True}, {"pipeline": 1}])
def test_nothing_is_said_of_stages_that_were_not_looked_for(asked: dict[str, Any]) -> None:
    parallel = MIXTRAL.parallel.model_copy(update=asked)
    plan = plan_anywhere(MIXTRAL.model_copy(update={"parallel": parallel}), joined(OLD, NEW), how=PEER)
    assert plan.stages == ()
    assert "several pools" not in "\n".join(plan.reasons)
