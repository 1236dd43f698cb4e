"""How groups form, and what a layer promises of them."""

import pytest
import torch

from moe.layers import MoELayer, TokenContext
from moe.spec import MoESpec


def layer_of(group_tokens: int = 8, **fields: object) -> MoELayer:
    spec = MoESpec(num_experts=4, model_dim=6, hidden_dim=10, group_tokens=group_tokens, capacity_factor=1.0,
                   min_capacity=1, **fields)  # fmt: skip
    return MoELayer(spec, layer=1, dtype=torch.float64)


def test_tokens_in_order_are_cut_into_groups_whatever_their_shape() -> None:
    torch.manual_seed(0)
    layer, x = layer_of(), torch.randn(4, 6, 6, dtype=torch.float64)
    y, routing = layer(x)
    assert y.shape == x.shape
    assert routing.num_groups == 3
    flat, _ = layer(x.view(24, 6))
    assert torch.equal(flat.view(x.shape), y)
    first = TokenContext(torch.arange(8), torch.zeros(8, dtype=torch.bool))
    alone, _ = layer(x.view(24, 6)[:8], first)
    assert torch.equal(alone, flat[:8]), "a group alone meets the same fate"


def test_a_ragged_last_group_is_filled_up_with_padding() -> None:
    torch.manual_seed(0)
    layer, x = layer_of(), torch.randn(11, 6, dtype=torch.float64)
    y, routing = layer(x)
    assert y.shape == (11, 6)
    assert routing.num_groups == 2
    assert routing.num_choices == 22, "what fills up the group makes no choices"
    explicit = TokenContext(torch.arange(16).view(2, 8), (torch.arange(16) >= 11).view(2, 8))
    torch.testing.assert_close(layer(x, explicit)[0], y)


def test_given_groups_are_taken_as_they_are() -> None:
    torch.manual_seed(0)
    layer, x = layer_of(group_tokens=4), torch.randn(24, 6, dtype=torch.float64)
    context = TokenContext(torch.arange(24).view(2, 12), torch.zeros(2, 12, dtype=torch.bool))
    _, routing = layer(x, context)
    assert routing.num_groups == 2
    assert routing.capacity == 4  # int(12 · 1 / 4) = 3, rounded up to a multiple of 4


@pytest.mark.parametrize("shape", [(2, 8), (3, 12)])
def test_groups_that_do_not_describe_the_tokens_are_refused(shape: tuple[int, int]) -> None:
    context = TokenContext(padding=torch.zeros(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match="do not describe x"):
        layer_of()(torch.randn(24, 6, dtype=torch.float64), context)


def test_the_layer_keeps_nothing_between_calls() -> None:
    torch.manual_seed(0)
    layer, x = layer_of(), torch.randn(24, 6, dtype=torch.float64)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    y, _ = layer(x, TokenContext(step=3))
    layer(x, TokenContext(step=4))
    assert torch.equal(layer(x, TokenContext(step=3))[0], y)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_bfloat16_tokens_are_routed_in_float32() -> None:
    torch.manual_seed(0)
    layer = MoELayer(MoESpec(num_experts=4, model_dim=16, hidden_dim=16, group_tokens=32))
    x = torch.randn(32, 16)
    y, routing = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert routing.weight.dtype == torch.float32
    assert torch.equal(routing.expert, layer(x.bfloat16().float())[1].expert)


@pytest.mark.parametrize(
    ("x", "tokens", "why"),
    [
        (torch.zeros(24, 7), TokenContext(), r"must end in model_dim \(=6\)"),
        (
            torch.zeros(24, 6),
            TokenContext(torch.zeros(2, 12, dtype=torch.int64), torch.zeros(24, dtype=torch.bool)),
            "must be in the shape of padding",
        ),
    ],
)
def test_shapes_that_do_not_go_together_are_refused(x: torch.Tensor, tokens: TokenContext, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        layer_of()(x.double(), tokens)
