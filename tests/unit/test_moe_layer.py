"""How groups form, and what a layer guarantees about them."""

from typing import Any

import pytest
import torch

from moe.layers import MoELayer, TokenContext
from moe.parallel import Layout, apply
from moe.plan.degrees import ShardCounts
from moe.plan.placement import build_placements
from moe.routing import BatchCounts, route
from moe.spec import MoESpec, SpecError
from moe.spec.routers import ROUTERS


def layer_of(group_tokens: int = 8, **fields: object) -> MoELayer:
    spec = MoESpec(num_experts=4, model_dim=6, hidden_dim=10, group_tokens=group_tokens, capacity_factor=1.0,
                   min_capacity=1, **fields)  # fmt: skip
    return MoELayer(spec, layer=1, dtype=torch.float64)


def test_tokens_in_order_are_cut_into_groups_for_any_shape() -> None:
    torch.manual_seed(0)
    layer, x = layer_of(), torch.randn(4, 6, 6, dtype=torch.float64)
    y, routing = layer(x)
    assert y.shape == x.shape
    assert routing.num_groups == 3
    flat, _ = layer(x.view(24, 6))
    assert torch.equal(flat.view(x.shape), y)
    first = TokenContext(torch.arange(8), torch.zeros(8, dtype=torch.bool))
    group_y, _ = layer(x.view(24, 6)[:8], first)
    assert torch.equal(group_y, flat[:8]), "a group alone meets the same fate"


def test_a_ragged_last_group_is_filled_up_with_padding() -> None:
    torch.manual_seed(0)
    layer, x = layer_of(), torch.randn(11, 6, dtype=torch.float64)
    y, routing = layer(x)
    assert y.shape == (11, 6)
    assert routing.num_groups == 2
    assert routing.num_choices == 22, "what fills up the group makes no choices"
    explicit = TokenContext(torch.arange(16).view(2, 8), (torch.arange(16) >= 11).view(2, 8))
    torch.testing.assert_close(layer(x, explicit)[0], y)


def test_given_groups_are_used_as_they_are() -> None:
    torch.manual_seed(0)
    layer, x = layer_of(group_tokens=4), torch.randn(24, 6, dtype=torch.float64)
    ids, padding = torch.arange(24).view(2, 12), torch.zeros(2, 12, dtype=torch.bool)
    y, routing = layer(x, TokenContext(ids, padding))
    assert (routing.num_groups, routing.capacity) == (2, 4)  # int(12 · 1 / 4) = 3, rounded up to a multiple of 4
    assert torch.equal(layer(x, TokenContext(ids.t().contiguous().t(), padding))[0], y), "ids in column-major order"


@pytest.mark.parametrize("shape", [(4, 6), (1, 24), (2, 2, 6)], ids=str)
def test_groups_may_be_given_of_tokens_in_any_shape(shape: tuple[int, ...]) -> None:
    """`[G, S]` describes the tokens in order, as for flat tokens."""
    torch.manual_seed(0)
    layer, x = layer_of(group_tokens=4), torch.randn(24, 6, dtype=torch.float64)
    for padding in (torch.arange(24).view(2, 12) % 5 == 4, torch.arange(27).view(3, 9) >= 22):
        y, routing = layer(x, TokenContext(padding=padding))
        shaped_y, of_shaped = layer(x.view(*shape, 6), TokenContext(padding=padding))
        assert torch.equal(shaped_y, y.view(shaped_y.shape))
        assert of_shaped.num_groups == routing.num_groups == padding.shape[0]


@pytest.mark.parametrize(
    ("axis", "place"), [("expert", r"experts\.w_in\.shape\[0\] \(=6\)"), ("expert_tensor", r"w_in\.shape\[2\] \(=9\)")]
)
def test_a_layout_that_does_not_divide_the_layer_is_refused(axis: str, place: str) -> None:
    spec = MoESpec(num_experts=6, model_dim=8, hidden_dim=9)
    layout = Layout(0, 4, torch.device("cpu"), {axis: 4})
    with pytest.raises(SpecError, match=rf"{place} must be divisible by the {axis} degree \(=4\)"):
        apply(MoELayer(spec), build_placements(spec.parameters(), ShardCounts.from_degrees(layout.degrees)), layout)


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


def router_layer(router: str, **fields: object) -> MoELayer:
    spec = MoESpec(router=router, num_experts=4, model_dim=6, hidden_dim=10, group_tokens=8, **fields)
    return MoELayer(spec, layer=1, dtype=torch.float64)


ROUTED: list[dict[str, Any]] = [
    {"router": "gshard_top2"}, {"router": "switch_top1", "input_jitter": 0.1},
    {"router": "softmax_topk", "aux_scope": "sequence", "aux_coefficient": 0.1, "z_coefficient": 0.1},
    {"router": "sigmoid_topk", "aux_scope": "global_batch", "aux_coefficient": 0.1, "bias_update_rate": 0.1},
    {"router": "sinkhorn_topk"}, {"router": "sparsemixer", "jitter_noise": 0.5}, {"router": "expert_choice"},
]  # fmt: skip


@pytest.mark.parametrize("fields", ROUTED, ids=lambda fields: fields["router"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_values_of_padded_rows_change_nothing(fields: dict, dtype: torch.dtype, training: bool) -> None:
    """Outputs and gradients are the same bits, in the router and in the experts that every token passes."""
    torch.manual_seed(0)
    layer = router_layer(**fields, activation="swiglu", shared_hidden_dim=5, shared_gate=True)
    padding = torch.arange(24).view(3, 8) % 5 > 2
    tokens = TokenContext(torch.arange(24).view(3, 8), padding, training=training)
    x = torch.randn(3, 8, 6).to(dtype)
    results = []
    for parameters in (0.0, 7.0, float("inf"), float("nan")):
        inputs = x.masked_fill(padding[..., None], parameters).requires_grad_()
        y, routing = layer(inputs, tokens)
        y.backward(torch.ones_like(y))
        gradients = [parameter.grad for parameter in layer.parameters()]
        results.append([y.detach(), inputs.grad, routing.aux_loss, routing.z_loss, routing.entropy, *gradients])
        layer.zero_grad()
    assert not results[0][1][padding].any()
    for result in results[1:]:
        assert all(torch.equal(actual, expected) for actual, expected in zip(result, results[0], strict=True))


@pytest.mark.parametrize("fields", ROUTED, ids=lambda fields: fields["router"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_factor_of_an_experts_weights_is_one_of_its_outputs(fields: dict, training: bool) -> None:
    torch.manual_seed(0)
    scaled, plain = (router_layer(**fields, activation="swiglu", expert_scale=scales) for scales in (True, False))
    factors_E, x = torch.tensor([0.5, -2.0, 1.5, 3.0]).double(), torch.randn(3, 8, 6).double()
    with torch.no_grad():
        scaled.load_state_dict({**plain.state_dict(), "expert_scale": factors_E})
        plain.experts.w_out.mul_(factors_E[:, None, None])
    tokens = TokenContext(torch.arange(24).view(3, 8), training=training)
    (y, routing), (expected, plain_routing) = scaled(x, tokens), plain(x, tokens)
    torch.testing.assert_close(y, expected)
    if routing.weight is not None:
        torch.testing.assert_close(routing.weight, plain_routing.weight * factors_E[routing.expert])
    y.square().sum().backward()
    expected.square().sum().backward()
    by_factor_E = (plain.experts.w_out.grad * plain.experts.w_out).sum((1, 2)) / factors_E
    torch.testing.assert_close(scaled.expert_scale.grad, by_factor_E)


def test_branches_and_the_router_have_norms_of_their_own() -> None:
    torch.manual_seed(0)
    fields = {"activation": "swiglu", "shared_hidden_dim": 5, "router": "softmax_topk"}
    layer = router_layer(**fields, router_norm=True, branch_norms=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x, plain = 3 * torch.randn(8, 6).double(), router_layer(**fields)
    own = {name: value for name, value in layer.state_dict().items() if name in plain.state_dict()}
    plain.load_state_dict(own)
    unit = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    choices = plain.route_tokens((unit * layer.router_scale / 6**0.5 @ layer.router)[None], TokenContext()).choices
    branches = (
        (layer.norm, layer.post_norm, lambda tokens: plain.run_experts(tokens, choices)),
        (layer.shared_norm, layer.shared_post_norm, plain.shared),
    )
    expected = 0
    for norm, post_norm, branch in branches:
        y = branch(unit * norm.weight)
        expected = expected + y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * post_norm.weight
    torch.testing.assert_close(layer(x)[0], expected)


def test_values_beyond_the_last_token_change_nothing() -> None:
    torch.manual_seed(0)
    layer, x = layer_of(shared_hidden_dim=5), torch.randn(21, 6, dtype=torch.float64)
    padding = torch.arange(24).view(2, 12) >= 19
    y, _ = layer(x, TokenContext(padding=padding))
    x[19:] = float("nan")
    assert torch.equal(layer(x, TokenContext(padding=padding))[0], y)


@pytest.mark.parametrize("scope", ["group", "sequence", "global_batch"])
def test_the_auxiliary_losses_enter_the_backward_pass_by_themselves(scope: str) -> None:
    """Once, with their coefficients, and equally for any division of the batch into calls."""
    torch.manual_seed(0)
    layer = router_layer("softmax_topk", aux_scope=scope, aux_coefficient=0.3, z_coefficient=0.2)
    if layer.last_load is not None:
        layer.last_load.copy_(torch.tensor([5, 3, 0, 0]))
    x = torch.randn(4, 8, 6, dtype=torch.float64)
    ids = torch.arange(32).view(4, 8)
    padding = ids % 5 == 4

    def gradient(parts: list[slice], scale: float) -> torch.Tensor:
        """Gradient of the router, where the loss is `scale` times the sum of y."""
        layer.zero_grad()
        counts = BatchCounts(num_groups=4, num_sequences=8, num_tokens=int((~padding).sum()))
        for part in parts:
            tokens = TokenContext(ids[part], padding[part], sequence_tokens=4, batch=counts)
            y, routing = layer(x[part], tokens)
            assert not routing.aux_loss.requires_grad
            (y.sum() * scale).backward()
        return layer.router.grad

    full_gradient = gradient([slice(0, 4)], 0.0)
    logits = (x @ layer.router.detach()).requires_grad_()
    tokens = TokenContext(ids, padding, sequence_tokens=4)
    routing = route(logits, layer.spec, tokens, state=layer.state)
    (0.3 * routing.aux_loss + 0.2 * routing.z_loss).backward()
    torch.testing.assert_close(full_gradient, torch.einsum("gsm,gse->me", x, logits.grad))
    torch.testing.assert_close(gradient([slice(0, 1), slice(1, 4)], 0.0), full_gradient)
    with_y = gradient([slice(0, 4)], 1.0)
    layer.spec = MoESpec(**{**layer.spec.model_dump(), "aux_coefficient": 0.0, "z_coefficient": 0.0})
    torch.testing.assert_close(gradient([slice(0, 4)], 1.0) + full_gradient, with_y)


def test_auxiliary_losses_have_no_gradient_in_evaluation() -> None:
    layer = router_layer("softmax_topk", aux_coefficient=0.3)
    y, _ = layer(torch.randn(8, 6, dtype=torch.float64), TokenContext(training=False))
    (y.sum() * 0).backward()
    assert not layer.router.grad.any()


ONE_CHOICE: list[dict[str, object]] = [
    {"router": "switch_top1"},
    *({"router": "sigmoid_topk", "top_k": 1, "renormalize_gates": renormalize} for renormalize in (True, False)),
    *(
        {"router": "softmax_topk", "top_k": 1, "softmax": softmax, "renormalize_gates": renormalize}
        for softmax in ("before_topk", "after_topk")
        for renormalize in (True, False)
    ),
    {"router": "softmax_topk", "top_k": 1},
    {"router": "sigmoid_topk", "top_k": 1},
    {"router": "sinkhorn_topk", "top_k": 1},
    {"router": "expert_choice", "capacity_factor": 1.0},
]


@pytest.mark.parametrize("fields", ONE_CHOICE, ids=str)
def test_accepted_specs_of_one_choice_train_the_router(fields: dict) -> None:
    """The experts' outputs alone train it, without an auxiliary loss; refused specs do not."""
    torch.manual_seed(0)
    has_aux_loss = "aux_coefficient" in ROUTERS[fields["router"]].model_fields
    layer = router_layer(**fields, **({"aux_coefficient": 0.0} if has_aux_loss else {}))
    layer(torch.randn(16, 6, dtype=torch.float64))[0].square().sum().backward()
    is_accepted = layer.spec.routing.never_trained() is None
    assert (layer.router.grad.abs().max() > 1e-3) == is_accepted
    assert is_accepted or layer.router.grad.abs().max() < 1e-12


def test_jitter_is_keyed_by_the_token_and_stays_within_bounds() -> None:
    torch.manual_seed(0)
    layer = router_layer("switch_top1", input_jitter=0.4, aux_coefficient=0.0)
    plain = router_layer("switch_top1", aux_coefficient=0.0)
    x = torch.randn(16, 6, dtype=torch.float64)
    ids = torch.arange(16)
    logits = layer._logits(x, ids, TokenContext(step=2))
    last_logits = layer._logits(x[8:], ids[8:], TokenContext(step=2))
    assert torch.equal(logits[8:], last_logits)
    assert not torch.equal(logits, layer._logits(x, ids, TokenContext(step=3)))
    far = (logits - plain._logits(x, ids, TokenContext())).abs()
    assert (far <= 0.4 * (x.abs() @ layer.router.abs())).all()
    assert far.min() > 0
    evaluation = TokenContext(training=False)
    assert torch.equal(layer._logits(x, ids, evaluation), plain._logits(x, ids, evaluation))


@pytest.mark.parametrize("router", ["softmax_topk", "sigmoid_topk"])
def test_a_step_is_remembered_only_when_it_ends(router: str) -> None:
    layer = router_layer(router, bias_update_rate=0.1, aux_scope="global_batch", aux_coefficient=0.1)
    _, routing = layer(torch.randn(16, 6, dtype=torch.float64))
    assert not layer.router_bias.any()
    assert not layer.last_load.any()
    layer.end_step(routing.chosen)
    assert torch.equal(layer.last_load, routing.chosen)
    assert torch.equal(layer.router_bias > 0, routing.chosen < 8)
    assert set(layer.state_dict()) > {"router_bias", "last_load"}
    assert set(router_layer("switch_top1").state_dict()) == {"router", "experts.w_in", "experts.w_out"}


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_the_output_may_be_changed_in_place(coefficient: float) -> None:
    layer = router_layer("softmax_topk", aux_coefficient=coefficient)
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    y, _ = layer(x)
    y += x  # a residual
    y.sum().backward()
    assert x.grad is not None


def test_sequences_that_groups_cut_through_are_refused() -> None:
    layer = router_layer("softmax_topk", aux_scope="sequence")
    assert layer(torch.randn(4, 4, 6, dtype=torch.float64))[1].aux_loss > 0
    with pytest.raises(ValueError, match="groups of 8 tokens must consist of whole sequences of 12"):
        layer(torch.randn(4, 12, 6, dtype=torch.float64))
