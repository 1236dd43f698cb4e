"""Routers with the fields of published models, beside their own code: the same experts, weights and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.layers import MoELayer, TokenContext
from moe.spec import MoESpec, presets

WIDTH, NUM_EXPERTS, TOKENS = 12, 8, 64
Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""(weights, experts), each `[T, K]`, of tokens `[T, M]`."""


def randomised(module: nn.Module) -> nn.Module:
    for tensor in (*module.parameters(), *module.buffers()):
        nn.init.normal_(tensor, std=0.3)
    return module


def deepseek_v2(**fields: Any) -> tuple[nn.Module, Router]:
    from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    router = randomised(DeepseekV2TopkRouter(DeepseekV2Config(
        hidden_size=WIDTH, num_attention_heads=2, n_routed_experts=NUM_EXPERTS, num_experts_per_tok=3, **fields
    )))  # fmt: skip
    return router, lambda x: router(x)[1:]


def deepseek_v3(**fields: Any) -> tuple[nn.Module, Router]:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    router = randomised(DeepseekV3TopkRouter(DeepseekV3Config(
        hidden_size=WIDTH, n_routed_experts=NUM_EXPERTS, num_local_experts=NUM_EXPERTS, num_experts_per_tok=3, **fields
    )))  # fmt: skip
    return router, lambda x: router(x)[1:]


def gpt_oss() -> tuple[nn.Module, Router]:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    config = GptOssConfig(hidden_size=WIDTH, num_local_experts=NUM_EXPERTS, num_experts_per_tok=3)
    router = randomised(GptOssTopKRouter(config))
    return router, lambda x: router(x)[1:]


def minimax_m2() -> tuple[nn.Module, Router]:
    from transformers.models.minimax_m2.configuration_minimax_m2 import MiniMaxM2Config
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter

    config = MiniMaxM2Config(hidden_size=WIDTH, num_local_experts=NUM_EXPERTS, num_experts_per_tok=3)
    router = randomised(MiniMaxM2TopKRouter(config))
    router.e_score_correction_bias = torch.randn(NUM_EXPERTS) / 4
    return router, lambda x: router(x, router.e_score_correction_bias)[1:]


def ernie_4_5() -> tuple[nn.Module, Router]:
    from transformers.models.ernie4_5_moe.configuration_ernie4_5_moe import Ernie4_5_MoeConfig
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter

    config = Ernie4_5_MoeConfig(hidden_size=WIDTH, moe_num_experts=NUM_EXPERTS, moe_k=3)
    router = randomised(Ernie4_5_MoeTopKRouter(config))
    nn.init.normal_(router.moe_statics.e_score_correction_bias, std=0.1)
    router.e_score_correction_bias = router.moe_statics.e_score_correction_bias.detach()[0]
    return router, lambda x: router(x)[1:]


GROUPS = {"num_expert_groups": 4, "expert_groups_per_token": 2}
SOFTMAX: dict[str, Any] = {"router": "softmax_topk", "renormalize_gates": False, "routed_scaling_factor": 16.0}
SIGMOID: dict[str, Any] = {"router": "sigmoid_topk", "bias_update_rate": 0.0, "selection_bias": True}
CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Router]], dict[str, Any]]] = {
    "DeepSeek-V2, greedy": (lambda: deepseek_v2(topk_method="greedy", routed_scaling_factor=16.0), SOFTMAX),
    "DeepSeek-V2, group-limited": (
        lambda: deepseek_v2(topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0),
        {**SOFTMAX, **GROUPS},
    ),
    "DeepSeek-V3": (
        lambda: deepseek_v3(n_group=4, topk_group=2, routed_scaling_factor=2.5),
        {**SIGMOID, **GROUPS, "routed_scaling_factor": 2.5},
    ),
    "DeepSeek-V3, not renormalised": (
        lambda: deepseek_v3(n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=False),
        {**SIGMOID, **GROUPS, "routed_scaling_factor": 2.5, "renormalize_gates": False},
    ),
    "GPT-OSS": (gpt_oss, {"router": "softmax_topk", "softmax": "after_topk", "logit_bias": True}),
    "MiniMax-M2": (minimax_m2, SIGMOID),
    "ERNIE 4.5": (ernie_4_5, {"router": "softmax_topk", "selection_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_weights_and_gradients_are_those_of_their_own_code(case: str) -> None:
    torch.manual_seed(0)
    build, fields = CASES[case]
    theirs, route = build()
    spec = MoESpec(num_experts=NUM_EXPERTS, model_dim=WIDTH, hidden_dim=4, top_k=3, group_tokens=TOKENS,
                   aux_coefficient=0.0, **fields)  # fmt: skip
    ours = MoELayer(spec)
    with torch.no_grad():
        ours.router.copy_(theirs.weight.t())
        if ours.logit_bias is not None:
            ours.logit_bias.copy_(theirs.bias)
        if ours.router_bias is not None:
            ours.router_bias.copy_(theirs.e_score_correction_bias)
    x = torch.randn(TOKENS, WIDTH)
    expected, expert = route(x)
    order = expert.argsort(1)
    logits = ours._logits(x, torch.arange(TOKENS), TokenContext())
    routing = ours.route(logits[None], TokenContext(), 0, ours.state)
    mine = routing.expert.argsort(1)
    assert torch.equal(routing.expert.gather(1, mine), expert.gather(1, order))
    weight, expected = routing.weight.gather(1, mine), expected.gather(1, order)
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
    gradient = torch.randn_like(weight)
    weight.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(ours.router.grad.t(), theirs.weight.grad, rtol=1e-4, atol=1e-5)
    if ours.logit_bias is not None:
        torch.testing.assert_close(ours.logit_bias.grad, theirs.bias.grad, rtol=1e-4, atol=1e-5)
    assert len(routing.expert.unique(dim=0)) > 8, "tokens choose, and not the bias alone"


def test_presets_say_how_published_models_choose() -> None:
    moe = presets.load("deepseek-v2").moe
    assert (moe.routing.num_expert_groups, moe.routing.max_expert_groups) == (8, 3)
    assert moe.routing.routed_scaling_factor == 16.0
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        moe = presets.load(name).moe
        assert (moe.activation, moe.activation_settings, moe.logit_bias) == ("swiglu_clamped", (1.702, 7.0), True)
