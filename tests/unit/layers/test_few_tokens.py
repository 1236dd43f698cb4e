"""The short way of few tokens through a layer of experts, and narrow products, beside the long ways."""

from typing import Any

import pytest
import torch

from moe import MoELayer, MoESpec, TokenContext
from moe.layers import linear as linear_module
from moe.layers.linear import linear
from moe.routing import recorded

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"router": "softmax_topk", "top_k": 3},
    "in groups": {"router": "softmax_topk", "top_k": 2, "num_expert_groups": 4, "expert_groups_per_token": 2},
    "sigmoid": {"router": "sigmoid_topk", "top_k": 3},
}


def made(router: dict[str, Any], hidden_dim: int = 24, activation: str = "swiglu") -> MoELayer:
    """With weights of every kind."""
    spec = MoESpec(
        model_dim=16, num_experts=8, hidden_dim=hidden_dim, activation=activation, shared_hidden_dim=8,
        expert_bias=True, group_tokens=16, **router,
    )  # fmt: skip
    layer = MoELayer(spec, layer=2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in layer.parameters():
            each.copy_(torch.randn(each.shape, dtype=each.dtype, generator=generator))
        if layer.router_bias is not None:
            layer.router_bias.copy_(torch.randn(8, generator=generator))
    return layer


@pytest.mark.parametrize("num_tokens", [0, 1, 8])
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_the_short_way_leads_where_the_long_one_does(router: dict[str, Any], num_tokens: int) -> None:
    layer, tokens = made(router), TokenContext(training=False)
    x = torch.randn(num_tokens, 16, dtype=torch.float64)
    with torch.no_grad():
        short = layer.decode_forward(x, tokens)
        assert short is not None
        torch.testing.assert_close(short, layer(x, tokens)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_tokens", [1, 100])
@pytest.mark.parametrize("hidden_dim", [8, 16, 24])
@pytest.mark.parametrize("activation", ["relu", "swiglu", "swiglu_clamped"])
def test_weights_laid_out_for_few_rows_are_the_same(num_tokens: int, hidden_dim: int, activation: str) -> None:
    layer = made(ROUTERS["softmax"], hidden_dim, activation)
    tokens, experts = TokenContext(training=False), layer.experts
    x, before = torch.randn(num_tokens, 16, dtype=torch.float64), dict(layer.state_dict())
    with torch.no_grad():
        expected = layer(x, tokens)[0]
        experts.lay_out_for_few_rows(torch.float64)
        torch.testing.assert_close(layer(x, tokens)[0], expected, rtol=1e-12, atol=1e-12)
        short = layer.decode_forward(x, tokens)
    assert (short is None) == (num_tokens == 100)
    if short is not None:
        torch.testing.assert_close(short, expected, rtol=1e-12, atol=1e-12)
    assert (experts.weights.w_in_and_gate is None) == (activation == "relu"), "which has no gate"
    assert experts.w_out[0].is_contiguous() == (hidden_dim <= 16), "else more inputs than outputs"
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_it_is_not_taken_where_more_is_asked_for() -> None:
    layer, x = made(ROUTERS["softmax"]), torch.randn(4, 16, dtype=torch.float64)
    inferring = TokenContext(training=False)
    assert layer.decode_forward(x, inferring) is None, "gradients are tracked"
    with torch.no_grad():
        assert layer.decode_forward(x, TokenContext()) is None, "training drops tokens"
        padded = TokenContext(padding=torch.tensor([True, False, False, False]), training=False)
        assert layer.decode_forward(x, padded) is None
        assert layer.decode_forward(x.repeat(100, 1), inferring) is None
        with recorded(layer) as recording:
            assert layer.decode_forward(x, inferring) is None
            layer(x, inferring)
        assert recording[2].shape == (4, 3)


def test_narrow_products_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in float32, of the same narrow numbers; the gradient of a wide weight is not rounded at all."""
    # Fakes no product: it takes the way of a CPU without bfloat16 instructions on one that has them, too.
    monkeypatch.setattr(linear_module, "multiplies", lambda dtype, device: False)
    x, weight = torch.randn(2, 3, 64).bfloat16().requires_grad_(), torch.randn(5, 64, requires_grad=True)
    gradient = torch.randn(2, 3, 5).bfloat16()
    y = linear(x, weight)
    y.backward(gradient)
    assert weight.grad is not None
    assert x.grad is not None
    narrow = weight.detach().bfloat16().double()
    exact = x.detach().double() @ narrow.t()
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), gradient.double() @ narrow, rtol=2**-8, atol=1e-5)
    of_weight = gradient.double().flatten(0, 1).t() @ x.detach().double().flatten(0, 1)
    torch.testing.assert_close(weight.grad.double(), of_weight, rtol=1e-5, atol=1e-5)
