"""Two plans compared: terms add up, the reverse comparison is the opposite, and causes are facts of the layouts."""

from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.plan import Cluster, Degrees, MadeFor, MemoryEstimate, Plan, PlanRequest, TimeEstimate, plan_job
from moe.plan.candidate import RECOMPUTES, SHARDINGS, Options
from moe.plan.causes import Causes
from moe.plan.compare import compare, describe_inputs, sentences
from moe.plan.requested_layout import parse_layout, pinned_layout, request_layout
from moe.spec import JobSpec, SpecError
from tests.grid import num_cases
from tests.refusals import expect_problem
from tests.unit.test_spec import job

GOLDEN = Path(__file__).parents[1] / "golden"
SECONDS = st.integers(0, 10**6).map(lambda millionths: millionths / 10**6)
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
    memory = {kind: draw(st.integers(0, 1 << 36)) for kind in MemoryEstimate.model_fields}
    seconds = {kind: draw(SECONDS) for kind in TIMES}
    return plan_of(degrees, options, memory, **{**seconds, "products_s": 0.5 + seconds["products_s"]})


@settings(max_examples=num_cases(120))  # a cause depends on several options at once
@given(plans(), plans())
def test_terms_add_up_the_reverse_is_the_opposite_and_the_largest_come_first(first: Plan, second: Plan) -> None:
    comparison, back = compare(first, second), compare(second, first)
    assert (comparison.step.first, comparison.step.second) == (first.predicted.step_s, second.predicted.step_s)
    assert (comparison.total.first, comparison.total.second) == (first.memory.total, second.memory.total)
    assert isclose(sum(term.difference for term in comparison.time.values()), comparison.step.difference, abs_tol=1e-9)
    assert sum(term.difference for term in comparison.memory.values()) == comparison.total.difference
    assert "hidden_s" not in comparison.time
    assert (comparison.hidden.first, comparison.hidden.second) == (first.predicted.hidden_s, second.predicted.hidden_s)
    for part in ("time", "memory", "layout", "priced_for", "made_for"):
        assert {name: (term.second, term.first) for name, term in getattr(comparison, part).items()} == {
            name: (term.first, term.second) for name, term in getattr(back, part).items()
        }
    causes, reverse_causes = Causes(first, second, 8), Causes(second, first, 8)
    for kind in TIMES:
        for is_more in (False, True):
            assert bool(causes.cause(kind, is_more)) == bool(reverse_causes.cause(kind, not is_more)), kind
    lines = sentences(first, second)
    figures = [float(line.split(": ")[1].split()[0]) for line in lines if " ms " in line and "predicted" not in line
               and not line.startswith(("all others", "memory"))]  # fmt: skip
    assert figures == sorted(figures, reverse=True)
    assert len(figures) <= 5
    if first.predicted.step_s != second.predicted.step_s:
        assert ("fast" if first.predicted.step_s < second.predicted.step_s else "slow") in lines[0]


@given(plans())
def test_a_plan_does_not_differ_from_itself(plan: Plan) -> None:
    comparison = compare(plan, plan)
    assert [*comparison.layout, *comparison.priced_for, *comparison.made_for] == []
    assert not any(term.difference for term in (*comparison.time.values(), *comparison.memory.values()))
    assert len(sentences(plan, plan)) == 1
    assert not any(Causes(plan, plan, 8).cause(kind, is_more) for kind in TIMES for is_more in (False, True))


PIPELINE = {"degrees": Degrees(data=8, pipeline=8)}
DATA_8, EXPERT_64 = {"degrees": Degrees(data=8)}, {"degrees": Degrees(expert=64)}
FLAT_64 = {**EXPERT_64, "options": replace(Options(), ranks_per_node=8)}


@pytest.mark.parametrize(
    ("kind", "first", "second", "cause"),
    [
        ("all_to_all_s", {"degrees": Degrees(expert=8)}, EXPERT_64,
         "less: expert groups of 8 stay within nodes of 8, those of 64 do not"),
        ("all_to_all_s", {"degrees": Degrees(expert=8)}, FLAT_64,
         "less: expert groups of 8 stay within nodes of 8, those of 64 do not"),
        ("all_to_all_s", EXPERT_64, {"degrees": Degrees(expert=16)}, "more: expert groups of 64 rather than 16"),
        ("all_to_all_s", DATA_8, {"degrees": Degrees(expert=8)}, "less: no row leaves its rank"),
        ("bubble_s", {**PIPELINE, "options": Options(virtual_stages=4)}, PIPELINE,
         "less: 8 stages of 4 virtual stages rather than 8 of 1"),
        ("bubble_s", PIPELINE, {"degrees": Degrees(data=64)}, "more: 8 stages rather than one"),
        ("products_s", {"options": Options(recompute="full")}, {},
         "more: whole blocks are recomputed in the backward pass"),
        ("products_s", {}, {"options": Options(recompute="selective")},
         "less: hidden states are not recomputed in the backward pass"),
        ("gather_s", {"degrees": Degrees(data=8, tensor=4)}, DATA_8, "more: tensor degree 4 rather than 1"),
        ("gather_s", DATA_8, {"degrees": Degrees(data=8, fsdp=8)}, "less: no parameters are gathered"),
        ("all_reduce_s", {"memory": {"gradients": 1 << 30}}, {"memory": {"gradients": 1 << 31}},
         "less: 1.00 GiB of gradients per device rather than 2.00 GiB"),
    ],
)  # fmt: skip
def test_a_cause_is_a_fact_of_the_two_layouts(
    kind: str, first: dict[str, Any], second: dict[str, Any], cause: str
) -> None:
    long, short = {kind: 0.3, "attention_s": 1.0}, {kind: 0.1, "attention_s": 1.0}
    seconds = (long, short) if cause.startswith("more") else (short, long)
    ranks_per_node = None if second is FLAT_64 else 8  # only hierarchical dispatch sets it
    given_nodes = {} if ranks_per_node is None else {"ranks_per_node": ranks_per_node}
    line = sentences(plan_of(**first, **seconds[0]), plan_of(**second, **seconds[1]), **given_nodes)[1]
    assert line.endswith(f": 200 ms {cause}")
    line = sentences(plan_of(**first, **seconds[1]), plan_of(**second, **seconds[0]), **given_nodes)[1]
    assert line.endswith("less" if cause.startswith("more") else "more"), "no cause against the facts"


def test_what_plans_were_made_for_is_reported() -> None:
    plan = plan_of(products_s=1)
    assert describe_inputs(plan, plan) == "the same"
    elsewhere = plan.model_copy(update={"made_for": MadeFor(spec="a", cluster="d", planner="e")})
    assert describe_inputs(plan, elsewhere) == "a different cluster and a different planner"
    silent = plan.model_copy(update={"made_for": None})
    assert describe_inputs(plan, silent) == "not recorded by the second"
    lines = sentences(plan, plan.model_copy(update={"tokens_per_step": 8192}))
    assert lines[0].startswith("the first is predicted 2.0 times as slow per token")
    assert "tokens per step: 4096 for the first, 8192 for the second" in lines


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "parallel", [{}, {"tensor": 2}, {"fsdp": 4}, {"pipeline": 2, "recompute": "full"}, {"expert_tensor": 2}]
)
def test_the_layout_of_a_plan_can_be_requested(parallel: dict[str, Any]) -> None:
    cluster = Cluster(num_nodes=2, devices_per_node=4, device="h100")
    plan = plan_job(JobSpec.parse(job(resources={"num_workers": 8}, parallel=parallel)), cluster)
    layout = pinned_layout(plan)
    assert parse_layout(",".join(f"{name}={value}" for name, value in layout.items()), "LAYOUT") == layout
    request = PlanRequest(spec=JobSpec.parse(job(resources={"num_workers": 8}, parallel={"tensor": 4})))
    repeat = request_layout(request, layout, 8)
    assert plan_job(repeat.spec, cluster, repeat.query.num_workers).candidate == plan.candidate
    twice = request_layout(request, layout, 16)
    with expect_problem("mismatch", "parallel"):
        plan_job(twice.spec, Cluster(num_nodes=4, devices_per_node=4, device="h100"), twice.query.num_workers)


@pytest.mark.parametrize("text", ["tensor", "tensor=", "colour=2", "auto=measured", "tensor=2,tensor=4"])
def test_invalid_layouts_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"write it as tensor=2|is not a field of parallel|is given twice"):
        parse_layout(text, "LAYOUT")


def test_runners_up_have_every_kind_and_those_of_earlier_releases_sums() -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=4, device="cpu")
    plan = plan_job(JobSpec.parse(job(resources={"num_workers": 4})), cluster)
    assert plan.runners_up
    for runner_up in plan.runners_up:
        assert runner_up.predicted is not None
        assert runner_up.memory is not None
        sums = runner_up.predicted.step_s, runner_up.memory.total
        assert sums == (runner_up.step_s, runner_up.memory_bytes)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    old = Plan.model_validate_json((GOLDEN / "version-3" / "gshard-600b.json").read_text())
    assert all(runner_up.predicted is runner_up.memory is None for runner_up in old.runners_up)
