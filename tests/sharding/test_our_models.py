"""The translation model, planned from its plain module with no hint: experts on the expert dimension, tokens by groups,
all-to-alls of the engine's own dispatcher, and the same losses and gradients on real ranks as on one device."""

import math

import pytest
import torch

from benchmarks.own_models import CASES, compared
from benchmarks.translation_loss import TranslationLoss
from moe.spec import MoESpec, TranslationModelSpec
from moe.tasks.translation import build_model
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import Built, differences


def translation(**fields: object) -> Built:
    """Of experts so large, for so few tokens, that tokens travel and not experts."""
    experts = MoESpec(num_experts=8, model_dim=16, hidden_dim=128, group_tokens=12,
                      **{"capacity_factor": 1.0, "min_capacity": 1, **fields})  # fmt: skip
    spec = TranslationModelSpec(
        model_dim=16, num_heads=2, head_dim=8, ffn_dim=32, num_encoder_layers=2, num_decoder_layers=2,
        source_vocab_size=300, target_vocab_size=300, dropout=0.1, moe=experts,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    source, target_in, target_out = (torch.randint(4, 300, (8, length), generator=generator) for length in (7, 5, 5))
    source[1, 4:] = 0
    target_out[2, 3:] = 0
    model = build_model(spec, dtype=torch.float64)
    return TranslationLoss(model), (source, target_in, target_out, torch.tensor(3))


def gshard() -> Built:
    return translation()


def softmax() -> Built:
    return translation(
        router="softmax_topk", top_k=2, expert_bias=True, activation="swiglu", z_coefficient=0.01, input_jitter=0.1
    )


BUILT = {"gshard": gshard, "softmax": softmax}


def on_ranks(mesh: dict[str, int], model: str) -> tuple[list[str], dict[str, str], dict[str, list[str]]]:
    wrong, plan = differences(BUILT[model], mesh, memory_bytes=3 << 20, steps=2)
    return wrong, plan.parameters, plan.options


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("gshard", {"a": 2}),
        pytest.param("gshard", {"a": 4}, marks=pytest.mark.grid),
        pytest.param("gshard", {"a": 2, "b": 2}, marks=pytest.mark.grid),
        ("softmax", {"a": 2, "b": 2}),
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_one_device(ranks: Pools, model: str, mesh: dict[str, int]) -> None:
    for wrong, parameters, options in ranks[math.prod(mesh.values())].run(on_ranks, mesh, model):
        assert wrong == []
        experts = {placements for name, placements in parameters.items() if name.endswith("experts.w_in")}
        assert experts
        assert all("S(0)" in each for each in experts), experts
        chosen = [each for name, each in options.items() if name.startswith("expert_feed_forward")]
        assert len(chosen) == 4
        assert all("exchange experts" in each for each in chosen), chosen


@pytest.mark.slow
def test_the_plan_of_the_plain_module_is_that_of_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts over all devices, the rest as FSDP has it; by both models of time within five hundredths."""
    monkeypatch.setitem(CASES, "here", ("gshard-128e-12l", 1 << 15, {**CASES["8 x h100"][2], "devices_per_node": 4}))
    found = compared("here")
    assert found["program"] == found["planner"]
    assert found["ratio_by_planner"] <= 1.05
    assert found["ratio_by_program"] <= 1.05
