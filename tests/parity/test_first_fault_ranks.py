"""Where a number went wrong on one rank alone, all ranks name the same place, and none waits for another."""

import pytest
import torch
import torch.distributed as dist

from moe.parallel import Layout
from moe.spec import AdamWSpec, MoESpec, TrainSpec, TranslationModelSpec
from moe.train.nonfinite import first_fault
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, rank_batch, state_of

MODEL = TranslationModelSpec(
    model_dim=16, num_heads=2, head_dim=8, ffn_dim=32, num_encoder_layers=2, num_decoder_layers=2,
    source_vocab_size=300, target_vocab_size=300,
    moe=MoESpec(num_experts=4, model_dim=16, hidden_dim=24, group_tokens=64),
)  # fmt: skip
TRAIN = TrainSpec(num_steps=1, optimizer=AdamWSpec(name="adamw"))
EXPERTS = "encoder.1.feed_forward.moe.experts.w_in"


def fault_with(place: str, faulty_rank: int) -> str | None:
    """What this rank is told where only `faulty_rank` holds an infinite parameter, output or gradient."""
    plan = Degrees(expert=2).plan(Shape().groups)
    layout = Layout.build(plan)
    state = state_of(MODEL, TRAIN, layout)
    model = state.model
    if dist.get_rank() == faulty_rank:
        experts = model.get_parameter(EXPERTS)
        if place == "parameter":
            experts.data.view(-1)[0] = torch.inf
        elif place == "output":
            model.encoder_norm.register_forward_hook(lambda _module, _inputs, output: output * torch.inf)
        elif place == "gradient":
            experts.grad = torch.full_like(experts, torch.inf)
    fault = first_fault(state, rank_batch(layout, plan, Shape(), 300, 1))
    layout.close()
    return fault


@pytest.mark.sample(4)
@pytest.mark.parametrize("faulty_rank", [0, 1])
@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("parameter", f"parameter {EXPERTS}"),
        ("output", "the output of encoder_norm"),
        ("gradient", f"the gradient of {EXPERTS}"),
        ("nowhere", None),
    ],
)
def test_a_fault_of_one_rank_is_told_to_all(ranks: Pools, place: str, named: str | None, faulty_rank: int) -> None:
    assert ranks[2].run(fault_with, place, faulty_rank) == [named, named]
