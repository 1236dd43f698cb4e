"""The router of ERNIE 4.5 compared with its own code: the same experts, weights and gradients. Routers of families
exchanged with transformers are compared in tests/language/test_families.py, within their models."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe.layers import MoELayer, TokenContext
from moe.spec import MoESpec, presets

WIDTH, NUM_EXPERTS, TOKENS = 12, 8, 64
Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""(weights, experts), each `[T, K]`, of tokens `[T, M]`."""


def ernie_4_5() -> tuple[nn.Module, Router]:
    from transformers.models.ernie4_5_moe.configuration_ernie4_5_moe import Ernie4_5_MoeConfig
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter

    router = Ernie4_5_MoeTopKRouter(Ernie4_5_MoeConfig(hidden_size=WIDTH, moe_num_experts=NUM_EXPERTS, moe_k=3))
    for tensor in (*router.parameters(), *router.buffers()):
        nn.init.normal_(tensor, std=0.3)
    nn.init.normal_(router.moe_statics.e_score_correction_bias, std=0.1)
    router.e_score_correction_bias = router.moe_statics.e_score_correction_bias.detach()[0]
    return router, lambda x: router(x)[1:]


def test_experts_weights_and_gradients_are_those_of_its_own_code() -> None:
    torch.manual_seed(0)
    reference, route = ernie_4_5()
    spec = MoESpec(num_experts=NUM_EXPERTS, model_dim=WIDTH, hidden_dim=4, top_k=3, group_tokens=TOKENS,
                   aux_coefficient=0.0, router="softmax_topk", selection_bias=True)  # fmt: skip
    layer = MoELayer(spec)
    with torch.no_grad():
        layer.router.copy_(reference.weight.t())
        layer.router_bias.copy_(reference.e_score_correction_bias)
    x = torch.randn(TOKENS, WIDTH)
    expected, expert = route(x)
    order = expert.argsort(1)
    logits = layer._logits(x, torch.arange(TOKENS), TokenContext())
    routing = layer.route(logits[None], TokenContext(), 0, layer.state)
    routing_order = routing.expert.argsort(1)
    assert torch.equal(routing.expert.gather(1, routing_order), expert.gather(1, order))
    weight, expected = routing.weight.gather(1, routing_order), expected.gather(1, order)
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
    gradient = torch.randn_like(weight)
    weight.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(layer.router.grad.t(), reference.weight.grad, rtol=1e-4, atol=1e-5)
    assert len(routing.expert.unique(dim=0)) > 8, "tokens choose, and not the bias alone"


def test_presets_say_how_published_models_choose() -> None:
    moe = presets.load("deepseek-v2").moe
    assert (moe.routing.num_expert_groups, moe.routing.max_expert_groups) == (8, 3)
    assert moe.routing.routed_scaling_factor == 16.0
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        moe = presets.load(name).moe
        assert (moe.activation, moe.activation_settings, moe.logit_bias) == ("swiglu_clamped", (1.702, 7.0), True)
