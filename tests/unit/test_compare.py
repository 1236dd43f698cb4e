"""Two plans compared: terms add up, the other way round is the opposite, and causes are facts of the layouts."""

import json
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.plan import Cluster, Degrees, MadeFor, MemoryEstimate, Plan, PlanRequest, TimeEstimate, plan_job
from moe.plan.candidate import RECOMPUTES, SHARDINGS, Options
from moe.plan.causes import Causes
from moe.plan.compare import compare, made_for_in_words, sentences
from moe.plan.requested_layout import asking_for, layout_to_ask, parse_layout
from moe.spec import JobSpec, SpecError
from tests.refusals import refused
from tests.unit.test_spec import job

GOLDEN = Path(__file__).parents[1] / "golden"
SECONDS = st.integers(0, 10**6).map(lambda millionths: millionths / 10**6)
BYTES = st.integers(0, 1 << 36)
DEGREE = st.sampled_from([1, 2, 4, 8])
TIMES = [kind for kind in TimeEstimate.model_fields if kind != "module_s"]


def plan_of(
    degrees: Degrees = Degrees(), options: Options = Options(), memory: dict[str, int] | None = None, **seconds: float
) -> Plan:
    amounts = dict.fromkeys(MemoryEstimate.model_fields, 0) | {"limit": 1 << 36} | (memory or {})
    return Plan(
        num_workers=degrees.num_workers, degrees=degrees, options=options, device="cuda", device_type="h100",
        memory=MemoryEstimate(**amounts), predicted=TimeEstimate(**seconds), tokens_per_step=4096, reasons=(),
        made_for=MadeFor(spec="a", cluster="b", planner="c"),
    )  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    degrees = Degrees(expert=draw(DEGREE), data=8, tensor=draw(DEGREE), expert_tensor=draw(DEGREE),
                      pipeline=draw(DEGREE), expert_fsdp=draw(DEGREE))  # fmt: skip
    options = Options(
        sharding=draw(st.sampled_from(SHARDINGS)), recompute=draw(st.sampled_from(RECOMPUTES)),
        virtual_stages=draw(DEGREE), num_chunks=draw(DEGREE), overlap=draw(st.booleans()),
        num_micro_batches=draw(DEGREE),
    )  # fmt: skip
    memory = {kind: draw(BYTES) for kind in MemoryEstimate.model_fields}
    seconds = {kind: draw(SECONDS) for kind in TIMES}
    return plan_of(degrees, options, memory, **{**seconds, "products_s": 0.5 + seconds["products_s"]})


@given(plans(), plans())
def test_terms_add_up_to_the_totals(first: Plan, second: Plan) -> None:
    found = compare(first, second)
    assert (found.step.first, found.step.second) == (first.predicted.step_s, second.predicted.step_s)
    assert (found.total.first, found.total.second) == (first.memory.total, second.memory.total)
    assert isclose(sum(each.difference for each in found.time.values()), found.step.difference, abs_tol=1e-9)
    assert sum(each.difference for each in found.memory.values()) == found.total.difference
    assert "hidden_s" not in found.time
    assert (found.hidden.first, found.hidden.second) == (first.predicted.hidden_s, second.predicted.hidden_s)


@given(plans(), plans())
def test_the_other_way_round_is_the_opposite(first: Plan, second: Plan) -> None:
    there, back = compare(first, second), compare(second, first)
    for part in ("time", "memory"):
        assert {kind: -term.difference for kind, term in getattr(there, part).items()} == {
            kind: term.difference for kind, term in getattr(back, part).items()
        }
    for part in ("layout", "priced_for", "made_for"):
        assert {name: (both.second, both.first) for name, both in getattr(there, part).items()} == {
            name: (both.first, both.second) for name, both in getattr(back, part).items()
        }
    mine, others = Causes(first, second, 8), Causes(second, first, 8)
    for kind in TIMES:
        for is_more in (False, True):
            assert bool(mine.cause(kind, is_more)) == bool(others.cause(kind, not is_more)), kind


@given(plans())
def test_a_plan_beside_itself_differs_in_nothing(plan: Plan) -> None:
    found = compare(plan, plan)
    assert [*found.layout, *found.priced_for, *found.made_for] == []
    assert not any(each.difference for each in (*found.time.values(), *found.memory.values()))
    assert len(sentences(plan, plan)) == 1
    assert not any(Causes(plan, plan, 8).cause(kind, is_more) for kind in TIMES for is_more in (False, True))


@given(plans(), plans())
def test_the_largest_differences_come_first_and_the_rest_is_told_of_together(first: Plan, second: Plan) -> None:
    told = sentences(first, second)
    figures = [float(line.split(": ")[1].split()[0]) for line in told if " ms " in line and "predicted" not in line
               and not line.startswith(("all others", "memory"))]  # fmt: skip
    assert figures == sorted(figures, reverse=True)
    assert len(figures) <= 5
    faster = first.predicted.step_s < second.predicted.step_s
    if first.predicted.step_s != second.predicted.step_s:
        assert ("fast" if faster else "slow") in told[0]


PIPELINE = {"degrees": Degrees(data=8, pipeline=8)}


@pytest.mark.parametrize(
    ("kind", "mine", "others", "told"),
    [
        ("all_to_all_s", {"degrees": Degrees(expert=8)}, {"degrees": Degrees(expert=64)},
         "less: expert groups of 8 stay within nodes of 8, those of 64 do not"),
        ("all_to_all_s", {"degrees": Degrees(expert=64)}, {"degrees": Degrees(expert=16)},
         "more: expert groups of 64 rather than 16"),
        ("all_to_all_s", {"degrees": Degrees(data=8)}, {"degrees": Degrees(expert=8)}, "less: no row leaves its rank"),
        ("bubble_s", {**PIPELINE, "options": Options(virtual_stages=4)}, PIPELINE,
         "less: 8 stages of 4 runs rather than 8 of 1"),
        ("bubble_s", PIPELINE, {"degrees": Degrees(data=64)}, "more: 8 stages rather than one"),
        ("products_s", {"options": Options(recompute="full")}, {},
         "more: whole blocks are computed again in the backward pass"),
        ("products_s", {}, {"options": Options(recompute="selective")},
         "less: hidden states are not computed again in the backward pass"),
        ("gather_s", {"degrees": Degrees(data=8, tensor=4)}, {"degrees": Degrees(data=8)},
         "more: tensor degree 4 rather than 1"),
        ("gather_s", {"degrees": Degrees(data=8)}, {"degrees": Degrees(data=8, fsdp=8)},
         "less: no parameters are gathered"),
        ("all_reduce_s", {"memory": {"gradients": 1 << 30}}, {"memory": {"gradients": 1 << 31}},
         "less: 1.00 GiB of gradients a device rather than 2.00 GiB"),
    ],
)  # fmt: skip
def test_a_cause_is_a_fact_of_the_two_layouts(
    kind: str, mine: dict[str, Any], others: dict[str, Any], told: str
) -> None:
    longer, shorter = {kind: 0.3, "attention_s": 1.0}, {kind: 0.1, "attention_s": 1.0}
    is_more = told.startswith("more")
    first, second = (
        plan_of(**mine, **(longer if is_more else shorter)),
        plan_of(**others, **(shorter if is_more else longer)),
    )
    line = sentences(first, second, ranks_per_node=8)[1]
    assert line.endswith(f": 200 ms {told}")
    other = (plan_of(**mine, **(shorter if is_more else longer)), plan_of(**others, **(longer if is_more else shorter)))
    assert sentences(*other, ranks_per_node=8)[1].endswith("less" if is_more else "more")  # no cause against the facts


def test_what_plans_were_made_for_is_told() -> None:
    plan = plan_of(products_s=1)
    assert made_for_in_words(plan, plan) == "the same"
    elsewhere = plan.model_copy(update={"made_for": MadeFor(spec="a", cluster="d", planner="e")})
    assert made_for_in_words(plan, elsewhere) == "another cluster and another planner"
    silent = plan.model_copy(update={"made_for": None})
    assert made_for_in_words(plan, silent) == "the second tells nothing of what they were planned for"
    larger = plan.model_copy(update={"tokens_per_step": 8192})
    assert sentences(plan, larger)[0].startswith("the first is predicted 2.0 times as slow a token")
    assert "tokens a step: 4096 of the first, 8192 of the second" in sentences(plan, larger)


def test_a_layout_asks_for_the_plan_that_it_is_of() -> None:
    cluster = Cluster(num_nodes=2, devices_per_node=4, device="h100")
    for asked in ({}, {"tensor": 2}, {"fsdp": 4}, {"pipeline": 2, "recompute": "full"}, {"expert_tensor": 2}):
        plan = plan_job(JobSpec.parse(job(resources={"num_workers": 8}, parallel=asked)), cluster)
        layout = layout_to_ask(plan)
        assert parse_layout(",".join(f"{name}={value}" for name, value in layout.items()), "LAYOUT") == layout
        free = PlanRequest(spec=JobSpec.parse(job(resources={"num_workers": 8}, parallel={"tensor": 4})))
        again = asking_for(free, layout, 8)
        assert plan_job(again.spec, cluster, again.query.num_workers).candidate == plan.candidate
    twice = asking_for(free, layout, 16)
    with refused(
        "mismatch",
        "parallel",
        "expert 1 x data 4 x tensor 1 x fsdp 1 x expert_tensor 2 x expert_fsdp 4 x context 1 x pipeline 1",
    ):
        plan_job(twice.spec, Cluster(num_nodes=4, devices_per_node=4, device="h100"), twice.query.num_workers)


@pytest.mark.parametrize(
    ("text", "told"),
    [("tensor", "write it as tensor=2"), ("tensor=", "write it as tensor=2"), ("colour=2", "is not a field "
                                                            "of parallel"),
     ("auto=measured", "is not a field of parallel"), ("tensor=2,tensor=4", "is given twice")],
)  # fmt: skip
def test_layouts_that_say_nothing_are_refused(text: str, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        parse_layout(text, "LAYOUT")


def test_runners_up_tell_of_each_kind_and_those_of_earlier_releases_of_sums() -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=4, device="cpu")
    plan = plan_job(JobSpec.parse(job(resources={"num_workers": 4})), cluster)
    assert plan.runners_up
    for each in plan.runners_up:
        assert each.predicted is not None
        assert each.memory is not None
        assert (each.predicted.step_s, each.memory.total) == (each.step_s, each.memory_bytes)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    old = json.loads((GOLDEN / "version-3" / "gshard-600b.json").read_text())
    assert all(each.predicted is each.memory is None for each in Plan.model_validate(old).runners_up)


def test_a_node_is_known_by_hierarchical_dispatch() -> None:
    within = plan_of(Degrees(expert=8), all_to_all_s=0.1)
    across = plan_of(Degrees(expert=64), replace(Options(), ranks_per_node=8), all_to_all_s=0.3)
    assert "stay within nodes of 8" in sentences(within, across)[1]
