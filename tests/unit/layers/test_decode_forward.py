"""Decoding few tokens through a layer of experts, and products in bfloat16, against the ordinary forward pass."""

from typing import Any

import pytest
import torch

from moe import MoELayer, MoESpec, TokenContext
from moe.layers import linear as linear_module
from moe.layers.linear import linear
from moe.routing import record_routing

ROUTERS: list[dict[str, Any]] = [
    {"router": "softmax_topk", "top_k": 3},
    {"router": "softmax_topk", "top_k": 2, "num_expert_groups": 4, "expert_groups_per_token": 2},
    {"router": "sigmoid_topk", "top_k": 3},
    {"router": "softmax_topk", "top_k": 2, "router_norm": True, "expert_scale": True, "branch_norms": True},
]
INFERRING = TokenContext(training=False)


def layer_of(router: dict[str, Any], hidden_dim: int = 24, activation: str = "swiglu") -> MoELayer:
    """A layer with every kind of weight."""
    spec = MoESpec(
        model_dim=16, num_experts=8, hidden_dim=hidden_dim, activation=activation, shared_hidden_dim=8,
        expert_bias=True, group_tokens=16, **router,
    )  # fmt: skip
    layer, generator = MoELayer(spec, layer=2, dtype=torch.float64), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*layer.parameters(), *([] if layer.router_bias is None else [layer.router_bias])):
            tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator))
    return layer


@pytest.mark.parametrize("num_tokens", [0, 8, 100])
@pytest.mark.parametrize("hidden_dim", [8, 16, 24])
@pytest.mark.parametrize("activation", ["relu", "swiglu", "swiglu_clamped"])
@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_decode_forward_and_another_weight_layout_equal_forward(
    num_tokens: int, hidden_dim: int, activation: str, router: dict[str, Any]
) -> None:
    layer = layer_of(router, hidden_dim, activation)
    experts, x = layer.experts, torch.randn(num_tokens, 16, dtype=torch.float64)
    before = dict(layer.state_dict())
    with torch.no_grad():
        expected, short = layer(x, INFERRING)[0], layer.decode_forward(x, INFERRING)
        experts.prepare_for_decoding(torch.float64)
        torch.testing.assert_close(layer(x, INFERRING)[0], expected, rtol=1e-12, atol=1e-12)
        for output in (short, layer.decode_forward(x, INFERRING)):
            assert (output is None) == (num_tokens == 100)
            torch.testing.assert_close(expected if output is None else output, expected, rtol=1e-12, atol=1e-12)
    assert (experts.weights.w_in_and_gate is None) == (activation == "relu"), "which has no gate"
    assert experts.w_out[0].is_contiguous() == (hidden_dim <= 16), "else more inputs than outputs"
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_decode_forward_declines_what_it_does_not_compute() -> None:
    layer, x = layer_of(ROUTERS[0]), torch.randn(4, 16, dtype=torch.float64)
    assert layer.decode_forward(x, INFERRING) is None, "gradients are tracked"
    context = TokenContext(padding=torch.tensor([True, False, False, False]), training=False)
    with torch.no_grad():
        assert layer.decode_forward(x, TokenContext()) is None, "training drops tokens"
        assert layer.decode_forward(x, context) is None
        assert layer.decode_forward(x.repeat(100, 1), INFERRING) is None
        with record_routing(layer) as recording:
            assert layer.decode_forward(x, INFERRING) is None
            layer(x, INFERRING)
        assert recording[2].shape == (4, 3)


def test_bfloat16_products_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in float32 of bfloat16 numbers; the gradient of a float32 weight is not rounded at all."""
    # No product is faked: a CPU with bfloat16 instructions takes the path of one without.
    monkeypatch.setattr(linear_module, "multiplies", lambda dtype, device: False)
    x, weight = torch.randn(2, 3, 64).bfloat16().requires_grad_(), torch.randn(5, 64, requires_grad=True)
    d_y, y = torch.randn(2, 3, 5).bfloat16(), linear(x, weight)
    y.backward(d_y)
    narrow, exact_x, exact_d_y = weight.detach().bfloat16().double(), x.detach().double(), d_y.double()
    torch.testing.assert_close(y.double(), exact_x @ narrow.t(), rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), exact_d_y @ narrow, rtol=2**-8, atol=1e-5)
    of_weight = exact_d_y.flatten(0, 1).t() @ exact_x.flatten(0, 1)
    torch.testing.assert_close(weight.grad.double(), of_weight, rtol=1e-5, atol=1e-5)
