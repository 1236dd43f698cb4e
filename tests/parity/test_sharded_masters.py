"""Float32 masters of bfloat16 matrices, sharded with the optimizer state: bit by bit what whole ones give, in the
memory that is planned."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe.parallel import Layout
from moe.plan import Cluster
from moe.plan.candidate import Candidate
from moe.plan.cost.memory import MemoryModel
from moe.plan.profile import OURS
from moe.spec import AdafactorSpec, AdamWSpec, JobSpec, LanguageModelSpec, MuonSpec, OptimizerSpec
from moe.train.optimizer.build import moments
from moe.train.signals import Signals
from moe.train.step import step
from moe.train.train_state import TrainState
from tests.grid import item_params
from tests.parity.combinations import ROUTERS, model_of, train_of
from tests.parity.digests import OF_THE_LAYOUT
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees, Model, Shape, batch_of, task_of

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": AdamWSpec(name="adamw", peak_lr=2.5e-3, weight_decay=0.1),
    "adafactor": AdafactorSpec(name="adafactor", peak_lr=1e-2),
    "muon": MuonSpec(name="muon", peak_lr=2.5e-3, weight_decay=0.1),
    "8-bit adamw": AdamWSpec(name="adamw", peak_lr=2.5e-3, moments="8bit"),
}
LAYOUTS = (
    Degrees(data=2, fsdp=2, expert_fsdp=2, sharding="optimizer", micro_batch_groups=1),
    Degrees(data=2, fsdp=2, expert_fsdp=2, sharding="gradients", micro_batch_groups=1),
    Degrees(expert=2, fsdp=2, sharding="gradients", micro_batch_groups=1),
    Degrees(data=2, fsdp=2, expert_fsdp=2, sharding="gradients", recompute="full"),
    Degrees(data=2, fsdp=2, expert_fsdp=2, sharding="optimizer", recompute="selective"),
    Degrees(pipeline=2, expert=2, fsdp=2, sharding="gradients", schedule="zero_bubble", micro_batch_groups=1),
)
MODELS: dict[str, Model] = {
    "translation": model_of(**ROUTERS["gated experts with biases, shared ones with a gate"]),
    **{name: language_model(name, **ROUTERS["softmax"]) for name in ATTENTIONS},
}
CASES = [
    *((name, LAYOUTS[number % 3], "adamw") for number, name in enumerate(MODELS)),
    *(("translation", layout, "adamw") for layout in LAYOUTS),
    *(("translation", LAYOUTS[1], optimizer) for optimizer in OPTIMIZERS),
]


def flat(record: dict[str, Any]) -> dict[str, str]:
    """Values of a record, and of its layers, by name, without measured times."""
    layers = {
        f"{name} of {layer['layer']}": value
        for layer in record["layers"]
        for name, value in layer.items()
        if name not in OF_THE_LAYOUT
    }
    return {name: str(value) for name, value in (record | layers).items() if name != "layers"}


def differences(model: Model, degrees: Degrees, optimizer: str) -> tuple[int, list[Any]]:
    """(number of this rank's masters, differences of the run with them from one with whole float32 weights)"""
    plan = degrees.plan(Shape().groups)
    layout = Layout.build(plan)
    train = train_of("bfloat16", optimizer=OPTIMIZERS[optimizer])
    states = [TrainState.build(task_of(model, train), layout) for _ in range(2)]
    states[0].shard_masters()
    run_differences: list[Any] = []
    for number in range(1, 4):
        records = [step(state, batch_of(layout, plan, Shape(), model, number), Signals()).record for state in states]
        assert all(record.is_finite for record in records)
        plain = [flat(record.to_plain()) for record in records]
        run_differences += [
            (number, name, *values) for name in plain[0] if len(set(values := [run[name] for run in plain])) > 1
        ]
    for sharded, whole in zip(states[0].shards.parameters, states[1].shards.parameters, strict=True):
        if not torch.equal(sharded.local, whole.local):
            run_differences.append(sharded.name)
    layout.close()
    return sum(shard.is_master for shard in states[0].shards.sharded), run_differences


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", item_params(CASES, 5))
def test_sharded_masters_are_updated_as_whole_ones(ranks: Pools, case: tuple[str, Degrees, str]) -> None:
    name, degrees, optimizer = case
    for num_masters, run_differences in ranks[degrees.workers].run(differences, MODELS[name], degrees, optimizer):
        assert num_masters > 0
        assert run_differences == []


SPEC = JobSpec.parse({
    "model": {
        "kind": "language", "model_dim": 256, "num_layers": 4, "ffn_dim": 1024, "vocab_size": 300,
        "attention": {"kind": "grouped_query", "num_heads": 8, "num_kv_heads": 4, "head_dim": 32},
        "moe": {"router": "softmax_topk", "top_k": 2, "num_experts": 4, "hidden_dim": 512, "activation": "swiglu",
                "group_tokens": 64},
    },
    "data": {"corpus": "synthetic", "max_tokens": 64},
    "train": {"num_steps": 2, "batch_tokens": 512, "dtype": "bfloat16",
              "optimizer": {"name": "adamw", "peak_lr": 1e-3}},
})  # fmt: skip


def held_bytes(degrees: Degrees) -> dict[str, int]:
    """Bytes of this rank's state after a step, by kind."""
    shape = Shape(groups=8, rows=1, source=32, target=32)
    plan = degrees.plan(shape.groups)
    layout = Layout.build(plan)
    assert isinstance(SPEC.model, LanguageModelSpec)
    state = TrainState.build(task_of(SPEC.model, SPEC.train), layout)
    state.shard_masters()
    step(state, batch_of(layout, plan, shape, SPEC.model, 1), Signals())
    masters = {shard.whole.name: shard for shard in state.shards.sharded if shard.is_master}
    narrow = [shard.values for shard in masters.values()]
    wide = [parameter.local for parameter in state.parameters if parameter.name not in masters]
    for shard in masters.values():
        assert shard.whole.local.untyped_storage().nbytes() == shard.whole.local.itemsize
        assert shard.shard.local.untyped_storage().nbytes() == shard.shard.local.nbytes
    in_optimizer = [tensor for _, _, tensor, _ in moments(state.optimizer, state.shards.parameters)]
    in_optimizer += [shard.shard.local for shard in masters.values()]
    layout.close()
    return {
        "parameters": sum(tensor.nbytes for tensor in (*narrow, *wide)),
        "optimizer": sum(tensor.nbytes for tensor in in_optimizer),
    }


BOTH_AXES = Degrees(data=2, fsdp=2, expert_fsdp=2, sharding="optimizer", micro_batch_groups=1)
NOT_EXPERTS = Degrees(expert=2, fsdp=2, sharding="gradients", micro_batch_groups=1, recompute="full")
EXPERTS_OF_A_LAYER = 4 // 2 * 3 * 256 * 512
"""Elements of a rank's experts, of which a copy is narrow at a time, and none after the step."""


@pytest.mark.parametrize(("degrees", "num_cast"), [
    (BOTH_AXES, 0), (replace(BOTH_AXES, recompute="full"), 0), (NOT_EXPERTS, EXPERTS_OF_A_LAYER),
])  # fmt: skip
def test_masters_take_the_memory_that_is_planned(ranks: Pools, degrees: Degrees, num_cast: int) -> None:
    """The plan also counts narrow copies of routers and norms, which are few."""
    plan = degrees.plan(8)
    cluster = Cluster(num_nodes=1, devices_per_node=2, device="cpu", memory_bytes=1 << 40)
    memory = MemoryModel(SPEC, cluster, OURS).estimate(Candidate(plan.degrees, plan.options))
    for sizes in ranks[2].run(held_bytes, degrees):
        assert sizes["parameters"] + 2 * num_cast == pytest.approx(memory.parameters, rel=0.002)
        assert sizes["optimizer"] == pytest.approx(memory.optimizer, rel=0.002)
    if degrees.expert_fsdp > 1:
        assert memory.parameters < 2.3 * SPEC.model.num_parameters(), "not 6 bytes for each weight"
