"""Verdicts on plans: workers to fit and workers to run, margins, and computation."""

from typing import Any

import pytest
from hypothesis import given

from moe.plan import Cluster, Plan, plan_job
from moe.plan.cost.flops import model_flops_per_step
from moe.plan.cost.memory import ALLOWANCE
from moe.plan.quantities import format_parameters, format_seconds
from moe.plan.search.search import LayoutSearch
from moe.plan.search.what_if import smallest_cluster
from moe.plan.speed import describe_speed
from moe.plan.verdict import verdict
from moe.spec import JobSpec, SpecError
from tests.refusals import expect_problem
from tests.unit.test_search_is_complete import Job, jobs

H100S = Cluster(num_nodes=8, devices_per_node=8, device="h100")


def language_job(preset: str, workers: int, max_tokens: int = 4096, **changes: Any) -> JobSpec:
    model = {"preset": preset, "moe": {"group_tokens": max_tokens}, **changes.pop("model", {})}
    train = {"num_steps": 100, "batch_tokens": 64 * max_tokens, "dtype": "bfloat16", **changes}
    data = {"corpus": "synthetic", "max_tokens": max_tokens}
    return JobSpec.parse({"model": model, "data": data, "train": train, "resources": {"num_workers": workers}})


LONG = language_job("qwen3-235b-a22b", 64, 131_072)


def verdict_of(plan: Plan) -> dict[str, str]:
    return dict(verdict(plan))


@pytest.mark.slow
def test_a_refusal_tells_what_fits() -> None:
    """Long sequences fit over context ranks; adapters fit at once."""
    with expect_problem("does_not_fit", "resources", "48 workers") as error:
        plan_job(LONG, H100S.sized_for(48), 48)
    (problem,) = error.value.problems
    assert problem.remedy.startswith("use 64 workers of this kind,")
    assert "adapter: {rank: 16, base: bfloat16}, which 48 workers hold" in problem.remedy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "model"),
    [(64, {}), (48, {"from": "/models/base", "adapter": {"rank": 16, "base": "bfloat16"}})],
    ids=["over context ranks", "adapter"],
)
def test_the_remedies_of_a_refusal_hold_the_job(workers: int, model: dict) -> None:
    spec = language_job("qwen3-235b-a22b", 64, 131_072, model=model)
    plan = plan_job(spec, H100S.sized_for(workers), workers, top=1)
    assert not plan.not_yet
    assert plan.memory.job_bytes <= plan.memory.limit - plan.memory.allowance


def test_the_smallest_cluster_can_run_the_job() -> None:
    """DeepSeek-V3 with its published batch: 168 devices hold it, with pipeline stages."""
    spec = language_job("deepseek-v3", 1024, batch_tokens=8192 * 4096)
    cluster, fewest = smallest_cluster(spec, H100S)
    assert (fewest.in_any_layout, fewest.to_run) == (168, 168)
    assert cluster.num_devices == 168


def test_what_no_layout_mends_is_held_and_never_run() -> None:
    fp8 = language_job("qwen3-30b-a3b", 8, dtype="fp8")
    fewest = LayoutSearch(fp8, H100S).fewest()
    assert fewest.in_any_layout is not None
    assert fewest.to_run is None
    with expect_problem("does_not_fit", "resources", "8 workers") as error:
        plan_job(language_job("qwen3-235b-a22b", 8, dtype="fp8"), H100S, 8)
    assert "only in a layout that cannot be run yet" in error.value.problems[0].remedy


def test_a_full_device_has_a_margin() -> None:
    """Qwen3-30B fills eight H100; the verdict separates what the job needs from the free margin."""
    plan = plan_job(language_job("qwen3-30b-a3b", 8, batch_tokens=256 * 4096), H100S, 8)
    memory = plan.memory
    assert memory.job_bytes + memory.margin == memory.limit
    assert memory.margin >= ALLOWANCE * memory.limit - 1
    assert f"{memory.margin / 2**30:.2f} GiB free for the framework" in verdict_of(plan)["fits"]
    assert any(
        f"{memory.job_bytes / 2**30:.2f} GiB of 80.00 GiB per device predicted" in reason for reason in plan.reasons
    )


@given(jobs())
def test_every_plan_leaves_what_allocators_fragment(job: Job) -> None:
    try:
        plan = plan_job(job.spec, job.cluster, job.workers, profile=job.profile, top=2)
    except SpecError:
        return
    for memory in (plan.memory, *(runner_up.memory for runner_up in plan.runners_up if runner_up.memory is not None)):
        assert memory.margin >= int(ALLOWANCE * memory.limit)
    assert verdict_of(plan)["fits"].startswith("yes")


def test_gradients_that_nobody_computes_do_not_count() -> None:
    """A frozen base needs two thirds of the products; attention over all pairs and adapters add to that."""
    base = language_job("qwen3-30b-a3b", 8)
    model_fields = {"from": "/models/base", "adapter": {"rank": 16, "base": "bfloat16"}}
    with_adapter = language_job("qwen3-30b-a3b", 8, model=model_fields)
    share = model_flops_per_step(with_adapter) / model_flops_per_step(base)
    assert 2 / 3 < share < 0.8
    plan = plan_job(with_adapter, H100S, 8)
    assert plan.utilization is not None
    assert plan.utilization == pytest.approx(
        model_flops_per_step(with_adapter) / plan.predicted.step_s / 8 / 989e12, rel=1e-6
    )


def test_the_best_that_cannot_be_run_is_told_by_its_speed() -> None:
    plan = plan_job(language_job("qwen3-30b-a3b", 8), H100S, 8)
    step_s, not_yet = plan.predicted.step_s, ("micro-batches side by side",)
    runners_up = [
        runner_up.model_copy(update={"step_s": step_s * factor, "not_yet": features})
        for runner_up, (factor, features) in zip(
            plan.runners_up, [(1.1, ()), (0.9, not_yet), (0.8, not_yet)], strict=False
        )
    ]
    changed = plan.model_copy(update={"runners_up": tuple(runners_up)})
    assert verdict_of(changed)["faster"].startswith(f"layout 4 below is {describe_speed(0.8 * step_s, step_s)},")


def test_speeds_and_seconds_in_words() -> None:
    """Percentages are of speed; long steps are in whole seconds."""
    times = [(1.0, 1.12), (1.12, 1.0), (1.0, 2.3), (5.0, 1.0), (1.0, 1.0), (1.0, 1.0003), (1.0003, 1.0)]
    words = ["12.0% faster", "10.7% slower", "2.3 times as fast", "5.0 times as slow", "as fast",
             "less than 0.1% faster", "less than 0.1% slower"]  # fmt: skip
    assert [describe_speed(step_s, than_s) for step_s, than_s in times] == words
    assert [format_seconds(seconds) for seconds in (0.0123, 12.34, 1170.4)] == ["12.3 ms", "12.3 s", "1,170 s"]


def test_quantities_that_round_up_to_the_next_unit_are_given_in_it() -> None:
    assert [format_seconds(seconds) for seconds in (0.9997, 999.7, 999.4)] == ["1 s", "1,000 s", "999 s"]
    assert [format_parameters(number) for number in (999_990_000, 960_000_000, 999_960, 999)] == [
        "1.0 B parameters", "960.0 M parameters", "1.0 M parameters", "999 parameters",
    ]  # fmt: skip
