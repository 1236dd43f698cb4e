"""The planner's models and search: against slow references and laws."""

import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published import ROWS
from moe.plan import DEVICES, Cluster, Degrees, LayoutSearch, Link, Plan, plan_job
from moe.plan.candidate import Candidate, Options, Sharding
from moe.plan.cost.memory import MemoryModel
from moe.plan.cost.skew import rank_skew
from moe.plan.cost.time import TimeModel
from moe.plan.profile import OURS, PEER, PROFILES, find_profile
from moe.plan.search.choices import divisors, steps
from moe.plan.software import SOFTWARE
from moe.spec import JobSpec, MoESpec
from tests.refusals import expect_problem
from tests.unit.test_spec import job

GIB = 1024**3


def h100s(num_nodes: int, memory_gib: float = 80) -> Cluster:
    return Cluster(num_nodes=num_nodes, devices_per_node=8, device="h100", memory_bytes=int(memory_gib * GIB))


def translation(workers: int, **changes: Any) -> JobSpec:
    return JobSpec.parse(job(resources={"num_workers": workers}, **changes))


def mixtral(num_workers: int, **parallel: Any) -> JobSpec:
    return JobSpec.parse(
        {
            "model": {"preset": "mixtral-8x7b"}, "data": {"corpus": "synthetic", "max_tokens": 4096},
            "train": {"num_steps": 1, "batch_tokens": 256 * 4096, "dtype": "bfloat16"},
            "resources": {"num_workers": num_workers}, "parallel": parallel,
        }
    )  # fmt: skip


def joined_by_one_switch(num_workers: int, memory_gib: float) -> Cluster:
    """A100s that exchange 25 GB/s each, within their nodes too."""
    link = Link(devices=num_workers, bytes_per_s=25e9, latency_s=5e-6)
    return Cluster(num_nodes=num_workers // 8, devices_per_node=8, device="a100-80",
                   memory_bytes=int(memory_gib * GIB), links=(link,))  # fmt: skip


plan_as_peer = partial(plan_job, profile="peer")


def kind_of(plan: Plan) -> str:
    if plan.degrees.pipeline > 1:
        return "pipeline"
    if plan.degrees.tensor > 1 or plan.degrees.expert_tensor > 1:
        return "tensor"
    if plan.degrees.expert > 1:
        return "expert"
    gathers = plan.options.sharding == "parameters" and max(plan.degrees.fsdp, plan.degrees.expert_fsdp) > 1
    return "fsdp" if gathers else "replicated"


def test_less_memory_splits_more_and_at_last_is_refused() -> None:
    """With less and less memory: replicated parameters; then parameters sharded and gathered, or experts spread; then
    every matrix split; then a refusal with the number of workers that would do."""
    spec = mixtral(16, pipeline=1, context=1)
    every_gib = (2000, 350, 200, 52)
    kinds = [kind_of(plan_as_peer(spec, joined_by_one_switch(16, memory_gib))) for memory_gib in every_gib]
    assert (kinds[0], kinds[-1]) == ("replicated", "tensor")
    assert kinds[1:-1] == ["fsdp", "expert"]
    with expect_problem("does_not_fit", "resources", "16 workers"):
        plan_as_peer(spec, joined_by_one_switch(16, 48))
    assert kind_of(plan_as_peer(mixtral(16, sharding="optimizer"), joined_by_one_switch(16, 64))) == "pipeline"


PRINT_PLAN = """
from benchmarks.published import ROWS
from moe.plan import plan_job
row = ROWS[{row}]
print(plan_job(row.job({{}}), row.cluster).model_dump_json())
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("index", [16, 5], ids=lambda index: ROWS[index].name)
def test_a_plan_is_the_same_to_the_byte(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process, whose sets have another order, and with the last bits of numbers changed, as on another
    machine."""
    row = ROWS[index]
    plan = plan_job(row.job({}), row.cluster).model_dump_json()
    environment = {**os.environ, "PYTHONHASHSEED": "1"}  # this process has another seed
    script = PRINT_PLAN.format(row=index)
    process = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == plan
    name = row.cluster.device
    device = DEVICES[name]
    rates = {name: math.nextafter(value, math.inf) for name, value in vars(device).items() if type(value) is float}
    monkeypatch.setitem(DEVICES, name, replace(device, **rates))
    assert plan_job(row.job({}), row.cluster).model_dump_json() == plan


def test_a_users_fields_are_kept_to() -> None:
    user_fields = {"tensor": 4, "pipeline": 2, "virtual_stages": 4, "sharding": "parameters", "recompute": "selective",
             "micro_batch_groups": 2, "overlap": True, "expert": 8, "expert_tensor": 1}  # fmt: skip
    row = ROWS[5]
    plan = plan_job(row.job(user_fields), row.cluster)
    plan_fields = vars(plan.degrees) | vars(plan.options)
    assert {name: plan_fields[name] for name in user_fields} == user_fields
    assert set(plan.not_yet) == {"micro-batches side by side under FSDP"}


def test_a_step_waits_for_data_that_takes_longer() -> None:
    """A tiny model and many tokens: the host lays them out more slowly than eight GPUs take them."""
    small = {"preset": "gshard-tiny-dense", "model_dim": 8, "num_heads": 1, "head_dim": 8, "ffn_dim": 8,
             "num_encoder_layers": 1, "num_decoder_layers": 1,
             "source_vocab_size": 300, "target_vocab_size": 300}  # fmt: skip
    tokens = 1 << 24
    waits = plan_job(translation(1, model=small, train={"batch_tokens": tokens}), h100s(1), 1)
    assert waits.predicted.step_s == pytest.approx(1e-4 + tokens / 1.8e9 + tokens / 1.1e8, rel=1e-3)
    assert waits.predicted.data_s > 0
    assert plan_job(translation(8), h100s(1)).predicted.data_s == 0


def test_measured_loads_count() -> None:
    """Measured loads change the predicted time and memory."""
    row = ROWS[0]
    fields = {"expert": 32, "pipeline": 8, "tensor": 2, "micro_batch_groups": 1}
    even, uneven = (plan_job(row.job(fields), row.cluster, load_skew=skew) for skew in (1.0, 2.5))
    assert uneven.predicted.step_s > 1.2 * even.predicted.step_s
    assert uneven.memory.total > even.memory.total


@pytest.mark.slow
def test_exchanges_overlap_where_blocks_are_interrupted_for_them() -> None:
    """Not under full recomputation, and in a pipeline only between virtual stages."""
    for row in (ROWS[0], ROWS[5]):
        layouts = LayoutSearch(row.job({"overlap": True}), row.cluster).ranking(row.num_devices, 8).fitting
        assert len(layouts) == 8
        for layout in layouts:
            assert layout.candidate.options.overlap
            assert layout.candidate.options.recompute != "full"
            assert layout.candidate.degrees.pipeline == 1 or layout.candidate.options.virtual_stages > 1


@pytest.mark.parametrize(
    "parallel", [{"pipeline": 64}, {"pipeline": 32, "overlap": True}, {"pipeline": 4, "virtual_stages": 40}]
)
def test_a_pipeline_of_more_stages_than_layers_is_refused(parallel: dict[str, Any]) -> None:
    with expect_problem("out_of_range", "parallel.pipeline", parallel["pipeline"]):
        LayoutSearch(ROWS[6].job(parallel), ROWS[6].cluster)


def test_gathers_hide_behind_arithmetic_but_not_in_a_pipeline() -> None:
    row = ROWS[2]
    fsdp = {"tensor": 1, "expert": 8, "expert_tensor": 1, "sharding": "parameters", "recompute": "full"}
    flat = plan_job(row.job({**fsdp, "pipeline": 1}), row.cluster).predicted
    pipeline = plan_job(row.job({**fsdp, "pipeline": 2}), row.cluster).predicted
    assert flat.hidden_s > 4 * flat.gather_s
    assert pipeline.gather_s > 4 * flat.gather_s


def candidate_of(degrees: Degrees, groups: int, num_micro_batches: int, sharding: Sharding) -> Candidate:
    return Candidate(
        degrees, Options(micro_batch_groups=groups, num_micro_batches=num_micro_batches, sharding=sharding)
    )


def reduction_s(sharding: Sharding, num_micro_batches: int, **degrees: int) -> tuple[float, float]:
    """(seconds of gradient reduction and weight gathering, the part of them that hides)."""
    candidate = candidate_of(Degrees(**degrees), 4, num_micro_batches, sharding)
    step = TimeModel(mixtral(16), joined_by_one_switch(16, 80), PEER, SOFTWARE["megatron-eager"]).estimate(candidate)
    return step.all_reduce_s + step.hidden_s, step.hidden_s


CUT_UP = {"expert": 2, "data": 8, "fsdp": 16, "expert_fsdp": 8}


def test_gradients_are_scattered_by_each_micro_batch_and_updated_weights_gathered_once_a_step() -> None:
    """Gradients are in float32; weights are in bfloat16, which takes half as long."""
    seconds_1, seconds_2, seconds_4 = (reduction_s("gradients", times, **CUT_UP)[0] for times in (1, 2, 4))
    assert seconds_1 == pytest.approx(reduction_s("optimizer", 4, **CUT_UP)[0])
    scatter = seconds_2 - seconds_1
    assert seconds_4 - seconds_1 == pytest.approx(3 * scatter, rel=1e-4)
    assert seconds_1 == pytest.approx(1.5 * scatter, rel=1e-2)
    in_part = {**CUT_UP, "expert_fsdp": 1}  # experts are replicated, and reduced after the last
    assert reduction_s("gradients", 4, **in_part)[0] < 2 * reduction_s("gradients", 1, **in_part)[0]


def test_scatters_hide_behind_each_backward_pass_but_in_a_pipeline_behind_the_last() -> None:
    flat_s = [reduction_s("gradients", times, **CUT_UP)[1] for times in (1, 4)]
    assert flat_s[1] > 2 * flat_s[0]
    stages = {"expert": 2, "data": 4, "fsdp": 8, "expert_fsdp": 4, "pipeline": 2}
    pipeline_s = [reduction_s("gradients", times, **stages)[1] for times in (1, 4)]
    assert pipeline_s[1] == pipeline_s[0] > 0


def our_reduction_s(sharding: Sharding, **degrees: int) -> tuple[float, float]:
    """(seconds of gradient reduction and weight gathering, the part of them that hides) of our executor, whose
    collectives overlap as far as they can."""
    software = replace(SOFTWARE["ours-eager"], overlap=1.0)
    candidate = candidate_of(Degrees(**degrees), 4, 1, sharding)
    step = TimeModel(mixtral(16), joined_by_one_switch(16, 80), OURS, software).estimate(candidate)
    return step.all_reduce_s + step.hidden_s, step.hidden_s


def test_the_last_gradients_are_reduced_after_the_backward_pass() -> None:
    """Those of the embedding and of one layer's experts."""
    total_s, hidden_s = our_reduction_s("parameters", expert=2, data=8)
    exposed_s = total_s - hidden_s
    expert_elements, embedding_elements = 4 * 3 * 4096 * 14_336, 32_000 * 4096
    per_layer_s, embedding_s = total_s / 32, total_s / 32 * embedding_elements / expert_elements
    assert 0.5 * per_layer_s < exposed_s < 1.5 * (per_layer_s + embedding_s)


def test_updated_weights_are_gathered_after_the_update() -> None:
    total_s, hidden_s = our_reduction_s("optimizer", **CUT_UP)
    gather_s = total_s / 3  # of bfloat16, where float32 gradients are scattered
    assert total_s - hidden_s == pytest.approx(gather_s, rel=0.02)


def test_a_bucket_of_gradients_is_copied_and_no_more() -> None:
    """At most half of the experts of a layer, which have three matrices."""
    memory = MemoryModel(mixtral(16), joined_by_one_switch(16, 80), OURS)
    alone, replicated = (
        memory.estimate(candidate_of(degrees, 1, 4, "parameters")).communication
        for degrees in (Degrees(expert=8, data=1), Degrees(expert=2, data=8))
    )
    four_experts = 4 * 3 * 4096 * 14_336
    assert alone == pytest.approx(4 * 2 * 32_000 * 4096, rel=1e-3)  # at most the embedding and the head
    assert replicated == 4 * four_experts // 2


@pytest.mark.parametrize(("sharding", "times"), [("gradients", 1), ("optimizer", 0)])
def test_a_layer_s_gradients_are_there_wide_as_they_are_scattered(sharding: Sharding, times: int) -> None:
    """In addition to the shard that stays. Gradients scattered once a step are contiguous already."""
    memory = MemoryModel(mixtral(16), joined_by_one_switch(16, 80), PEER)
    full, cut = (
        memory.estimate(candidate_of(Degrees(expert=2, data=8, fsdp=16, expert_fsdp=expert_fsdp), 1, 4, sharding))
        for expert_fsdp in (1, 8)
    )
    four_experts = 4 * 3 * 4096 * 14_336
    assert cut.communication - full.communication == times * 4 * four_experts


@pytest.mark.parametrize("num_micro_batches", [2, 4, 8, 16])
def test_gradients_that_are_scattered_more_often_are_never_faster(num_micro_batches: int) -> None:
    """The reduction once a step, mostly the sum of replicated experts, hides behind one backward pass."""
    degrees = Degrees(expert=2, data=8, fsdp=16, expert_fsdp=1)
    time = TimeModel(mixtral(16), joined_by_one_switch(16, 80), PEER, SOFTWARE["megatron-eager"])
    optimizer_s, gradients_s = (
        time.step_s(candidate_of(degrees, 1, num_micro_batches, sharding)) for sharding in ("optimizer", "gradients")
    )
    assert optimizer_s <= gradients_s


def test_what_cannot_be_run_is_not_chosen_for_a_run() -> None:
    spec = translation(8, train={"batch_tokens": 8192})
    plan = plan_job(spec, h100s(1))
    assert not plan.not_yet
    with expect_problem("not_runnable", "parallel", None):
        sharded = {"overlap": True, "fsdp": 2, "sharding": "parameters"}
        plan_job(translation(8, parallel=sharded, train={"batch_tokens": 8192}), h100s(1), to_run=True)


@pytest.mark.slow
def test_a_published_job_can_be_run_as_planned() -> None:
    assert not plan_job(ROWS[5].job({}), ROWS[5].cluster, to_run=True).not_yet


@given(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3), st.integers(1, 200))
def test_a_cluster_of_any_size_has_links_that_join_it(factors: list[int], num_devices: int) -> None:
    """Also where its outermost level is not a multiple of the one within."""
    level_sizes = list(itertools.accumulate(factors, int.__mul__))
    links = tuple(Link(devices=devices, bytes_per_s=1e9 / devices, latency_s=1e-6) for devices in level_sizes)
    cluster = Cluster(num_nodes=level_sizes[-1], devices_per_node=1, device="h100", memory_bytes=GIB, links=links)
    sized_cluster = cluster.sized_for(num_devices)
    assert sized_cluster.num_devices == num_devices
    assert sized_cluster.links is not None
    rates = [link.bytes_per_s for link in sized_cluster.links]
    assert rates == [link.bytes_per_s for link in links][: len(rates)]


def test_a_dtype_that_the_device_lacks_is_refused() -> None:
    with expect_problem("unsupported", "train.dtype", "fp8"):
        plan_job(translation(8, train={"dtype": "fp8"}), Cluster(num_nodes=1, devices_per_node=8, device="a100-80"))


def test_divisors_and_steps() -> None:
    for number, limit in itertools.product(range(1, 60), (1, 7, 60)):
        assert divisors(number, limit) == [divisor for divisor in range(1, limit + 1) if number % divisor == 0]
    assert [steps(limit) for limit in (1, 3, 8, 11)] == [[1], [1, 2, 3], [*range(1, 9)], [*range(1, 9), 10, 11]]
    assert steps(40)[8:] == [10, 12, 14, 16, 20, 24, 28, 32, 40]


def test_skew_evens_out_over_a_ranks_experts_and_ends_at_the_capacity() -> None:
    free = MoESpec(router="softmax_topk", num_experts=64, top_k=2, model_dim=8, hidden_dim=8)
    assert rank_skew(2.0, free, 1) == 1
    assert rank_skew(2.0, free, 4) == pytest.approx(1 + 1 / 4)
    assert rank_skew(2.0, free, 64) == 2
    switch = MoESpec(router="switch_top1", num_experts=64, model_dim=8, hidden_dim=8, capacity_factor=1.25)
    assert rank_skew(2.0, switch, 64) == 1.25


@pytest.mark.slow
def test_a_profile_prices_the_same_model_as_another_runs_it() -> None:
    """Profile `ours` is the default; profiles differ only in what they declare. A peer's layout is never run."""
    spec, cluster = mixtral(16), joined_by_one_switch(16, 80)
    default, explicit = (plan_job(spec, cluster, profile=name) for name in (None, "ours"))
    assert default == explicit
    assert not explicit.not_yet
    for peer in (plan_as_peer(spec, cluster), plan_as_peer(translation(2), h100s(1))):
        assert all(plan.not_yet[0] == "the layout of a peer" for plan in (peer, *peer.runners_up))
    with expect_problem("not_runnable", "parallel", None):
        plan_as_peer(spec, cluster, to_run=True)
    candidate = candidate_of(Degrees(expert=8, data=2, tensor=2, fsdp=8), 1, 16, "parameters")
    memory = {name: MemoryModel(spec, cluster, profile).estimate(candidate) for name, profile in PROFILES.items()}
    vocabulary = spec.model.parameters()[0].numel
    assert (
        memory["ours"].optimizer - memory["peer"].optimizer == 2 * 4 * vocabulary // 2 // 8 * 2
    )  # two unsharded tables
    assert memory["ours"].communication > memory["peer"].communication  # gathered in float32
    assert (find_profile(), find_profile("ours"), find_profile("peer")) == (OURS, OURS, PEER)
