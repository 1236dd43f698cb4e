"""Plans with narrow moments, an optimizer on the host, and rows dispatched in 8 bits."""

from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from moe.plan import Cluster, LayoutSearch, Plan, TimeEstimate, plan_job
from moe.plan.cost.memory import ALLOWANCE
from moe.plan.executable import check_requested_features
from moe.plan.plan import MemoryEstimate
from moe.spec import JobSpec
from tests.refusals import expect_problem


def job(
    optimizer: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    preset: str = "olmoe-1b-7b",
    rows: int = 32,
    **train: Any,
) -> JobSpec:
    return JobSpec.parse(
        {
            "model": {"preset": preset}, "data": {"corpus": "synthetic", "max_tokens": 4096},
            "train": {"num_steps": 1, "batch_tokens": rows * 4096, "dtype": "bfloat16",
                      "optimizer": {"name": "adamw", **(optimizer or {})}, **train},
            "resources": {"num_workers": 8}, "parallel": parallel or {},
        }
    )  # fmt: skip


H100 = Cluster(num_nodes=1, devices_per_node=8, device="h100")
SPREAD = {"expert": 8, "tensor": 1, "context": 1, "pipeline": 1, "sharding": "parameters"}


def estimates(plan: Plan, spec: JobSpec) -> tuple[MemoryEstimate, TimeEstimate]:
    """Memory and time of another spec in a plan's layout."""
    search = LayoutSearch(spec, H100)
    return search.memory.estimate(plan.candidate), search.time.estimate(plan.candidate)


def master_bytes(wide: MemoryEstimate, narrow: MemoryEstimate) -> int:
    """Bytes of the float32 masters that are sharded as optimizer state: all but the moments, of which bfloat16 takes
    half."""
    return 2 * narrow.optimizer - wide.optimizer


@pytest.mark.parametrize("parallel", [{}, SPREAD, {**SPREAD, "sharding": "optimizer"}], ids=str)
def test_narrow_moments_take_half_and_those_on_the_host_nothing(parallel: dict[str, Any]) -> None:
    plan = plan_job(job(parallel=parallel), H100)
    (wide, _), (narrow, narrow_time), (host, host_time) = (
        estimates(plan, job(fields, parallel)) for fields in ({}, {"moments": "bfloat16"}, {"offload": True})
    )
    moments, masters = 2 * (wide.optimizer - narrow.optimizer), master_bytes(wide, narrow)
    if plan.candidate.options.sharding == "parameters":
        assert masters == pytest.approx(0, abs=1e-6 * moments)
    elif plan.degrees.expert_fsdp > 1:  # those of matrices, which are nearly all weights
        assert 0.9 < masters / (moments / 2) < 1
    else:  # those of matrices outside experts: a rank updates whole ones of its experts, which are its parameters
        matrices = [
            weight for weight in job().model.parameters() if ".attention." in weight.name and "norm" not in weight.name
        ]
        assert masters == 4 * sum(weight.numel for weight in matrices) // plan.degrees.fsdp
    assert host.optimizer == masters, "masters of sharded matrices stay on the device"
    assert wide.by_kind() | {"optimizer": 0} == host.by_kind() | {"optimizer": 0}
    assert narrow_time.optimizer_s < plan.predicted.optimizer_s < host_time.optimizer_s


@pytest.mark.parametrize("parallel", [{}, SPREAD], ids=str)
def test_8_bit_moments_take_a_quarter_and_their_scales(parallel: dict[str, Any]) -> None:
    """Every row of OLMoE's matrices is a multiple of 256; norms keep float32."""
    spec = job(parallel=parallel)
    plan = plan_job(spec, H100)
    memories, times = zip(
        *(estimates(plan, job({"moments": moments}, parallel)) for moments in ("float32", "bfloat16", "8bit")),
        strict=True,
    )
    masters = master_bytes(memories[0], memories[1])
    wide, narrow = (memory.optimizer - masters for memory in (memories[0], memories[2]))
    assert narrow / wide == pytest.approx((1 + 4 / 256) / 4, rel=1e-3)
    assert times[2].optimizer_s < times[0].optimizer_s


def test_rows_of_8_bits_take_less_of_the_links_on_their_way_out_alone() -> None:
    """Of the four exchanges, one (forward, to the experts) is narrow: back forward and both gradients stay wide."""
    spec, narrow = (job(parallel={**SPREAD, "recompute": "none"}, dispatch_dtype=dtype) for dtype in (None, "fp8"))
    plan = plan_job(spec, H100)
    assert plan.options.num_chunks == 1 or plan.predicted.all_to_all_s
    plain = replace(plan.candidate, options=replace(plan.candidate.options, num_chunks=1, overlap=False))
    wide_s, narrow_s = (LayoutSearch(job_spec, H100).time.estimate(plain).all_to_all_s for job_spec in (spec, narrow))
    assert pytest.approx(narrow_s / wide_s, rel=0.02) == (3 + (1 + 4 / 128) / 2) / 4


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("spec", "feature"),
    [(job(dispatch_dtype="fp8"), "rows that travel in 8 bits"), (job(dtype="fp8"), "fp8")],
    ids=["dispatch", "products"],
)  # fmt: skip
def test_they_can_be_planned_and_are_refused_where_they_would_be_run(spec: JobSpec, feature: str) -> None:
    assert feature in plan_job(spec, H100).not_yet
    with expect_problem("not_runnable", "parallel", None):
        check_requested_features(spec)


@pytest.mark.slow
def test_mixtral_fits_on_eight_devices_with_its_optimizer_on_the_host_only() -> None:
    with expect_problem("does_not_fit", "resources", "8 workers"):
        plan_job(job(preset="mixtral-8x7b", rows=8), H100)
    assert plan_job(job({"offload": True}, preset="mixtral-8x7b", rows=8), H100).memory.optimizer == 0


def test_of_masters_on_the_host_narrow_weights_that_are_not_sharded_may_be_all_that_fits() -> None:
    """With a peer's masters on the host, experts on a single data rank take 6 bytes a parameter; sharded float32
    weights would take 8. The search must not prune by the larger number."""
    spec = JobSpec.parse(
        {
            "model": {"kind": "language", "model_dim": 256, "num_layers": 2, "ffn_dim": 1024, "vocab_size": 300,
                      "tie_embeddings": True,
                      "attention": {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
                      "moe": {"router": "softmax_topk", "top_k": 2, "num_experts": 4, "hidden_dim": 2048,
                              "group_tokens": 8192}},
            "data": {"corpus": "synthetic", "max_tokens": 8192},
            "train": {"num_steps": 1, "batch_tokens": 8192, "dtype": "bfloat16",
                      "optimizer": {"name": "adamw", "offload": True}},
            "resources": {"num_workers": 2},
            "parallel": {"fsdp": 2, "expert": 2, "context": 1, "recompute": "full"},
        }
    )  # fmt: skip
    pair = H100.model_copy(update={"devices_per_node": 2})
    search = LayoutSearch(spec, pair, profile="peer")
    memory, candidates = search.memory, [layout.candidate for layout in search.ranking(2, 100).fitting]
    bytes_by_sharding = {
        candidate.options.sharding: memory.total(candidate) - memory.allowance for candidate in candidates
    }
    room = ceil(min(bytes_by_sharding.values()) / (1 - ALLOWANCE))
    smaller = pair.model_copy(update={"memory_bytes": room + 2})
    fitting = LayoutSearch(spec, smaller, profile="peer").ranking(2, 1).fitting
    assert {layout.candidate.options.sharding for layout in fitting} == {"gradients"}
