"""Memory of a step in pipeline stages and over context ranks, as planned and as tensors take it on the ranks."""

from typing import Any

import pytest

from moe.parallel import Layout, local_parameters
from moe.plan import Cluster, MemoryEstimate
from moe.plan.candidate import Candidate
from moe.plan.cost.memory import MemoryModel
from moe.plan.profile import OURS
from moe.spec import JobSpec, TranslationModelSpec
from moe.tasks.build import build_model
from moe.train.optimizer.build import moments
from moe.train.signals import Signals
from moe.train.step import step
from tests.parity.combinations import model_of
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, batch_of, state_of
from tests.sharding.test_memory_bound import LiveBytes

SHAPE = Shape(groups=8, rows=1, source=256, target=256)
LENGTH = SHAPE.source + SHAPE.target
MODEL: dict[str, Any] = {
    "kind": "language", "model_dim": 256, "num_layers": 4, "ffn_dim": 1024, "vocab_size": 1000,
    "attention": {"kind": "grouped_query", "num_heads": 8, "num_kv_heads": 4, "head_dim": 32},
    "moe": {"router": "softmax_topk", "top_k": 2, "num_experts": 4, "hidden_dim": 512, "activation": "swiglu",
            "group_tokens": LENGTH},
}  # fmt: skip
SPEC = JobSpec.parse(
    {
        "model": MODEL,
        "data": {"corpus": "packages", "max_tokens": LENGTH},
        "train": {"num_steps": 2, "batch_tokens": SHAPE.groups * LENGTH,
                  "optimizer": {"name": "adamw", "peak_lr": 1e-3}},
    }
)  # fmt: skip
LAYOUTS = [
    Degrees(micro_batch_groups=2),
    *(Degrees(data=2, context=2, micro_batch_groups=2, context_exchange=exchange)
      for exchange in ("gather", "ring", "heads")),
    Degrees(pipeline=2, micro_batch_groups=1),
    Degrees(pipeline=2, micro_batch_groups=1, schedule="gpipe"),
    Degrees(pipeline=2, micro_batch_groups=1, virtual_stages=2),
    Degrees(pipeline=2, micro_batch_groups=1, schedule="zero_bubble"),
    Degrees(pipeline=2, micro_batch_groups=1, virtual_stages=2, schedule="zb_v"),
    Degrees(pipeline=2, micro_batch_groups=2, recompute="full"),
    Degrees(data=2, context=2, micro_batch_groups=2, recompute="full"),
    Degrees(data=2, context=2, micro_batch_groups=2, recompute="selective"),
]  # fmt: skip


def peak_bytes(degrees: Degrees) -> tuple[int, int]:
    """(this rank's place in the pipeline, most bytes of tensors in a step)."""
    plan = degrees.plan(SHAPE.groups)
    layout = Layout.build(plan)
    state = state_of(SPEC.model, SPEC.train, layout)
    batch = batch_of(layout, plan, SHAPE, SPEC.model, 1)
    step(state, batch, Signals())
    live = LiveBytes()
    for parameter in state.parameters:
        live.add(parameter.local)
        live.add(parameter.local.grad)
    for _, _, tensor, _ in moments(state.optimizer, state.parameters):
        live.add(tensor)
    with live:
        step(state, batch, Signals())
    layout.close()
    return layout.index("pipeline"), live.peak


def planned_bytes(degrees: Degrees, spec: JobSpec = SPEC) -> list[MemoryEstimate]:
    plan = degrees.plan(SHAPE.groups)
    cluster = Cluster(num_nodes=1, devices_per_node=degrees.workers, device="cpu", memory_bytes=1 << 40)
    memory = MemoryModel(spec, cluster, OURS)
    estimates = memory.by_pipeline_rank(Candidate(plan.degrees, plan.options))
    return [estimate.model_copy(update={"staging": 0}) for estimate in estimates]


@pytest.mark.slow
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_a_rank_holds_what_is_planned(ranks: Pools, degrees: Degrees) -> None:
    answers = ranks[degrees.workers].run(peak_bytes, degrees) if degrees.workers > 1 else [peak_bytes(degrees)]
    estimates = planned_bytes(degrees)
    for rank, peak in answers:
        assert estimates[rank].job_bytes == pytest.approx(peak, rel=0.1)


def parameter_bytes(spec: TranslationModelSpec) -> tuple[int, int]:
    """(this rank's place in the pipeline, bytes of its parameters)"""
    layout = Layout.build(Degrees(pipeline=2, micro_batch_groups=1).plan(SHAPE.groups))
    parameters = local_parameters(build_model(spec, layout))
    layout.close()
    return layout.index("pipeline"), sum(parameter.local.nbytes for parameter in parameters)


@pytest.mark.parametrize("shares_vocabulary", [False, True])
def test_stages_of_an_encoder_decoder_have_the_tables_that_are_planned(ranks: Pools, shares_vocabulary: bool) -> None:
    model = model_of().model_copy(
        update={"share_vocabulary": shares_vocabulary, "source_vocab_size": 300, "target_vocab_size": 300}
    )
    spec = SPEC.model_copy(update={"model": model})
    estimates = planned_bytes(Degrees(pipeline=2, micro_batch_groups=1), spec)
    for rank, num_bytes in ranks[2].run(parameter_bytes, model):
        assert estimates[rank].parameters == num_bytes
