"""Memory of Muon's update, as planned and as tensors take it on the ranks."""

from dataclasses import replace

import pytest
import torch

from moe.parallel import Layout, local_parameters
from moe.plan import Cluster, Plan
from moe.plan.candidate import Candidate
from moe.plan.cost.memory import MemoryModel
from moe.plan.cost.orthogonalization import update_bytes
from moe.plan.cost.stages import PipelineChoices, stages
from moe.plan.cost.units import units
from moe.plan.profile import OURS
from moe.spec import JobSpec, LanguageModelSpec, MuonSpec
from moe.tasks.build import build_model
from moe.train.optimizer.build import build_optimizer, update_parameters
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees
from tests.sharding.test_memory_bound import LiveBytes

MODEL = LanguageModelSpec.model_validate({
    "kind": "language", "model_dim": 256, "num_layers": 4, "ffn_dim": 1024, "vocab_size": 1000,
    "attention": {"kind": "grouped_query", "num_heads": 8, "num_kv_heads": 2, "head_dim": 32},
    "moe": {"router": "softmax_topk", "top_k": 2, "num_experts": 4, "hidden_dim": 512, "activation": "swiglu",
            "group_tokens": 64},
})  # fmt: skip
MUON = MuonSpec(name="muon", peak_lr=1e-3)
LAYOUTS = (
    Degrees(),
    Degrees(data=2),
    Degrees(data=4),
    Degrees(expert=2),
    Degrees(expert=4),
    Degrees(data=2, fsdp=2, expert_fsdp=2),
    Degrees(expert=2, tensor=2),
    Degrees(expert=2, expert_tensor=2),
    Degrees(expert=4, fsdp=4),
    Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2),
    Degrees(data=2, expert_tensor=2, fsdp=4, expert_fsdp=2),
)


NUM_STEPS = 4


def peak_bytes(plan: Plan) -> int:
    """Most bytes of tensors that a step of the optimizer creates on this rank, in the step with the lowest peak: for a
    moment after a collective, gloo's thread may still have its buffers."""
    layout = Layout.build(plan)
    parameters = local_parameters(build_model(MODEL, layout))
    optimizer = build_optimizer(MUON, parameters, layout)
    for parameter in parameters:
        parameter.local.grad = torch.ones_like(parameter.local)
    update_parameters(optimizer, parameters, 1e-3, None)
    peaks = []
    for _ in range(NUM_STEPS):
        live = LiveBytes()
        for parameter in parameters:
            for tensor in (parameter.local, parameter.local.grad, *optimizer.state[parameter.local].values()):
                live.add(tensor)
        state_bytes = live.current
        with live:
            update_parameters(optimizer, parameters, 1e-3, None)
        peaks.append(live.peak - state_bytes)
    return min(peaks)


@pytest.mark.sample(2)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_the_update_takes_what_is_planned(ranks: Pools, degrees: Degrees) -> None:
    """To the byte: all ranks own as much. A plan's total holds it beside the state."""
    plan = degrees.plan(8)
    answers = ranks[degrees.workers].run(peak_bytes, plan) if degrees.workers > 1 else [peak_bytes(plan)]
    (stage,) = stages(units(MODEL, OURS), PipelineChoices())
    planned = update_bytes(stage.units, plan.degrees, "cpu")
    assert max(answers) == planned
    spec = JobSpec.parse({
        "model": MODEL.model_dump(mode="json"), "data": {"corpus": "packages", "max_tokens": 64},
        "train": {"num_steps": 1, "batch_tokens": 64 * 8, "optimizer": {"name": "muon"}},
    })  # fmt: skip
    memory = MemoryModel(spec, Cluster(num_nodes=1, devices_per_node=4, device="cpu", memory_bytes=1 << 34), OURS)
    candidate = Candidate(plan.degrees, replace(plan.options, micro_batch_groups=1))
    estimate = memory.estimate(candidate)
    state = estimate.parameters + estimate.gradients + estimate.optimizer + estimate.staging
    assert estimate.total == memory.total(candidate) >= state + planned + estimate.allowance
    if degrees.workers == 1:  # activations of 64 tokens take less
        assert estimate.total == state + planned + estimate.allowance
