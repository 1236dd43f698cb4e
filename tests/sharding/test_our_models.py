"""The translation model, planned from its plain module without hints: experts split by expert, tokens by group, our
dispatcher's all-to-alls, and the losses and gradients of one device on real ranks."""

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.own_models import CASES, compare
from benchmarks.translation_loss import TranslationLoss
from moe.spec import MoESpec, TranslationModelSpec
from moe.tasks.translation import build_model
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import Built, check_on_ranks


def translation(num_rows: int = 8, **fields: object) -> Built:
    """Experts so large, for so few tokens, that tokens travel instead of experts."""
    moe = {"num_experts": 8, "model_dim": 16, "hidden_dim": 128, "group_tokens": 12, "capacity_factor": 1.0,
           "min_capacity": 1, **fields}  # fmt: skip
    spec = TranslationModelSpec(
        model_dim=16, num_heads=2, head_dim=8, ffn_dim=32, num_encoder_layers=2, num_decoder_layers=2,
        source_vocab_size=300, target_vocab_size=300, dropout=0.1, moe=MoESpec(**moe),
    )  # fmt: skip
    draw = torch.Generator().manual_seed(5)
    source, target_in, target_out = (torch.randint(4, 300, (num_rows, length), generator=draw) for length in (7, 5, 5))
    source[1, 4:] = 0
    target_out[2, 3:] = 0
    model = build_model(spec, dtype=torch.float64)
    return TranslationLoss(model), (source, target_in, target_out, torch.tensor(3))


SOFTMAX = {"router": "softmax_topk", "top_k": 2, "expert_bias": True, "activation": "swiglu", "z_coefficient": 0.01,
           "input_jitter": 0.1}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"gshard": {}, "softmax": SOFTMAX}
GRID = [pytest.param("gshard", mesh, marks=pytest.mark.grid) for mesh in ({"a": 4}, {"a": 2, "b": 2})]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), [("gshard", {"a": 2}), *GRID, ("softmax", {"a": 2, "b": 2})], ids=str)
def test_losses_and_gradients_are_those_of_one_device(ranks: Pools, model: str, mesh: dict[str, int]) -> None:
    plan = check_on_ranks(ranks, partial(translation, **MODELS[model]), mesh, memory_bytes=3 << 20, steps=2)
    experts = {placements for name, placements in plan.parameters.items() if name.endswith("experts.w_in")}
    assert experts
    assert all("S(0)" in placements for placements in experts), experts
    expert_options = [options for name, options in plan.options.items() if name.startswith("expert_feed_forward")]
    assert len(expert_options) == 4
    assert all("exchange experts" in options for options in expert_options), expert_options


@pytest.mark.slow
def test_the_plan_of_the_plain_module_is_that_of_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts over all devices, the rest as in FSDP, within 5% by both time models."""
    monkeypatch.setitem(CASES, "here", ("gshard-128e-12l", 1 << 15, {**CASES["8 x h100"][2], "devices_per_node": 4}))
    comparison = compare("here")
    assert comparison["program"] == comparison["planner"]
    assert comparison["ratio_by_planner"] <= 1.05
    assert comparison["ratio_by_program"] <= 1.05
