"""How groups form, and what a layer promises of them."""

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.layers import MoELayer, TokenContext
from moe.parallel import Layout, TokenShares
from moe.routing import BatchCounts, route
from moe.spec import MoESpec, SpecError
from moe.spec.routers import FIELDS


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


@pytest.mark.parametrize(
    ("axis", "place"),
    [("expert", r"moe\.experts\.w_in\.shape\[0\] \(=6\)"), ("expert_tensor", r"w_in\.shape\[2\] \(=9\)")],
)
def test_a_layout_that_does_not_divide_the_layer_is_refused(axis: str, place: str) -> None:
    spec = MoESpec(num_experts=6, model_dim=8, hidden_dim=9)
    layout = Layout(0, 4, torch.device("cpu"), {axis: 4})
    with pytest.raises(SpecError, match=rf"{place} must be divisible by the {axis} degree \(=4\)"):
        MoELayer(spec, layout=layout)


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


def routed(router: str, **fields: object) -> MoELayer:
    spec = MoESpec(router=router, num_experts=4, model_dim=6, hidden_dim=10, group_tokens=8, **fields)
    return MoELayer(spec, layer=1, dtype=torch.float64)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 6, 8, 12, 24]), max_size=3).map(tuple)


def in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def swapped(x: torch.Tensor) -> torch.Tensor:
    """With its first dimensions transposed, where it has two."""
    return x.transpose(0, 1) if x.dim() > 1 else x


KINDS: list[Callable[[torch.Tensor], object]] = [
    torch.Tensor.to_sparse, torch.Tensor.tolist, lambda x: numpy.ones(tuple(x.shape)), lambda x: x.to("meta"),
    lambda x: torch.nested.nested_tensor([x[None]], layout=torch.jagged), lambda x: None,
    lambda x: torch.nn.Parameter(x, requires_grad=False), in_inference_mode, swapped,
    lambda x: swapped(swapped(x).contiguous()),
]  # fmt: skip
"""What a tensor may be given as, where it is not as it should be: in few calls, or no other mistake would be met."""
WHATEVER: list[object] = [3, "x", {}, {"ids": None}, [], torch.ones(2), TokenContext, object()]
SHARES = [TokenShares("x"), TokenShares(-1), TokenShares(1.5), TokenShares(8, "x"), TokenShares(8, label=3)]


@st.composite
def calls(draw: st.DrawFn) -> tuple[object, object, object]:
    """x, tokens and shares that a layer may be called with by mistake, and that it may well be called with."""

    def seldom(mistakes: list[Any], otherwise: Any) -> Any:
        return draw(st.sampled_from(mistakes)) if draw(st.integers(0, 11)) == 7 else otherwise

    def some(shape: tuple[int, ...], dtypes: list[torch.dtype]) -> object:
        shape, dtype = draw(st.one_of(st.just(shape), SHAPES)), draw(st.sampled_from([None, *dtypes]))
        return None if dtype is None else seldom(KINDS, lambda x: x)(torch.zeros(shape, dtype=dtype))

    shape = draw(SHAPES)
    given = (*shape, draw(st.sampled_from([6, 6, 6, 5]))) if draw(st.integers(0, 9)) else shape
    x = seldom(KINDS, lambda x: x)(torch.ones(given, dtype=draw(st.sampled_from(DTYPES))))
    length = draw(st.sampled_from([None, None, 1, 4, 0, -1, 1.5, True]))
    step = draw(st.sampled_from([0, 7, 2**70, None, 0.5]))
    ids = some(shape, [torch.int64, torch.int64, torch.int32, torch.float32])
    padding = some(shape, [torch.bool, torch.bool, torch.int64, torch.float32])
    counts = [draw(st.sampled_from([1, 1, 1, 5, 2**70, 0, -1, 1.5, "3", None, True])) for _ in range(3)]
    batch = seldom([*WHATEVER, BatchCounts(*counts)], draw(st.sampled_from([None, BatchCounts(9, 9, 99)])))
    training = seldom([*WHATEVER, None, 0], draw(st.booleans()))
    tokens = TokenContext(ids, padding, step, training=training, sequence_tokens=length, batch=batch)
    return x, seldom([*WHATEVER, None], tokens), seldom([*WHATEVER, *SHARES, TokenShares(8)], None)


@settings(max_examples=600, deadline=None)
@given(calls(), st.sampled_from(sorted(FIELDS)), st.sampled_from(["group", "sequence", "global_batch"]))
def test_what_a_layer_cannot_take_is_a_value_error_in_words(
    call: tuple[Any, Any, Any], router: str, scope: str
) -> None:
    x, tokens, shares = call
    layer = routed(router, **({"aux_scope": scope} if "aux_scope" in FIELDS[router] else {}))
    try:
        y, routing = layer(x, tokens, shares)
    except ValueError as error:
        told = str(error)
    else:
        told = None
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        padding = None if tokens is None else tokens.padding
        real = x.shape[:-1].numel() if padding is None else int((~padding).sum())
        assert routing.num_tokens == real
    assert told is None or re.match(r"(x|ids|tokens|groups|shares)\b.* (must|are not|do not) ", told), told


@pytest.mark.parametrize(
    ("of_x", "tokens", "shares", "told"),
    [
        *((swapped, None, shares, rf"shares\.{field} \(=.*\) must be ") for field, shares in [
            ("num_tokens", TokenShares("x")), ("num_tokens", TokenShares(True)), ("group", TokenShares(6, "x")),
        ]),
        (in_inference_mode, None, None, "x .* must not be given where gradients are tracked; clone it"),
        (torch.clone, TokenContext(padding=in_inference_mode(torch.ones(4, 6).bool())), None,
         r"tokens\.padding .* must not be given where gradients are tracked; clone it"),
        (torch.clone, TokenContext(torch.arange(24).view(4, 6).t()), None,
         r"ids and padding \(6, 4\) must be in the shape \(4, 6\) of x without M: transpose them"),
        (torch.clone, TokenContext(padding=torch.ones(6, 4).bool()), None, r"\(6, 4\) must be in the shape \(4, 6\)"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_words(of_x: Any, tokens: Any, shares: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        layer_of()(of_x(torch.ones(4, 6, 6, dtype=torch.float64)), tokens, shares)


def test_ids_may_lie_in_any_order_in_memory() -> None:
    layer, x = layer_of(), torch.randn(24, 6, dtype=torch.float64)
    ids = torch.arange(24).view(2, 12)
    by_column = ids.t().contiguous().t()
    assert torch.equal(layer(x, TokenContext(by_column))[0], layer(x, TokenContext(ids))[0])


def test_ids_of_inference_mode_are_no_part_of_the_backward_pass() -> None:
    layer = routed("gshard_top2", second_expert="sampling", shared_hidden_dim=5)
    x, ids = torch.randn(4, 6, 6, dtype=torch.float64, requires_grad=True), torch.arange(24).view(4, 6)
    expected = torch.autograd.grad(layer(x, TokenContext(ids))[0].sum(), x)
    assert torch.equal(torch.autograd.grad(layer(x, TokenContext(in_inference_mode(ids)))[0].sum(), x)[0], *expected)


def test_inference_mode_takes_its_own_tensors() -> None:
    layer = layer_of(shared_hidden_dim=5)
    x = in_inference_mode(torch.ones(4, 6, 6, dtype=torch.float64))
    tokens = TokenContext(padding=in_inference_mode(torch.ones(4, 6).tril().bool()))
    with torch.no_grad():
        assert layer(x, tokens)[0].shape == x.shape
    with torch.inference_mode():
        assert layer(x, tokens)[0].shape == x.shape


ROUTED: list[dict[str, Any]] = [
    {"router": "gshard_top2"}, {"router": "switch_top1", "input_jitter": 0.1},
    {"router": "softmax_topk", "aux_scope": "sequence", "aux_coefficient": 0.1, "z_coefficient": 0.1},
    {"router": "sigmoid_topk", "aux_scope": "global_batch", "aux_coefficient": 0.1, "bias_update_rate": 0.1},
    {"router": "sinkhorn_topk"}, {"router": "expert_choice"},
]  # fmt: skip


@pytest.mark.parametrize("fields", ROUTED, ids=lambda fields: fields["router"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_what_padded_rows_hold_changes_nothing(fields: dict, dtype: torch.dtype, training: bool) -> None:
    """Neither outputs nor gradients, bit by bit: not of the router, nor of the experts that every token passes."""
    torch.manual_seed(0)
    layer = routed(**fields, activation="swiglu", shared_hidden_dim=5, shared_gate=True)
    padding = torch.arange(24).view(3, 8) % 5 > 2
    tokens = TokenContext(torch.arange(24).view(3, 8), padding, training=training)
    x = torch.randn(3, 8, 6).to(dtype)
    found = []
    for held in (0.0, 7.0, float("inf"), float("nan")):
        filled = x.masked_fill(padding[..., None], held).requires_grad_()
        y, routing = layer(filled, tokens)
        y.backward(torch.ones_like(y))
        gradients = [parameter.grad for parameter in layer.parameters()]
        found.append([y.detach(), filled.grad, routing.aux_loss, routing.z_loss, routing.entropy, *gradients])
        layer.zero_grad()
    assert not found[0][1][padding].any()
    for others in found[1:]:
        assert all(torch.equal(theirs, ours) for theirs, ours in zip(others, found[0], strict=True))


def test_what_the_last_group_holds_beyond_the_tokens_changes_nothing() -> None:
    torch.manual_seed(0)
    layer, x = layer_of(shared_hidden_dim=5), torch.randn(21, 6, dtype=torch.float64)
    padding = torch.arange(24).view(2, 12) >= 19
    y, _ = layer(x, TokenContext(padding=padding))
    x[19:] = float("nan")
    assert torch.equal(layer(x, TokenContext(padding=padding))[0], y)


@pytest.mark.parametrize("scope", ["group", "sequence", "global_batch"])
def test_the_auxiliary_losses_enter_the_backward_pass_by_themselves(scope: str) -> None:
    """Once, with their coefficients, and alike however the batch is cut into calls."""
    torch.manual_seed(0)
    layer = routed("softmax_topk", aux_scope=scope, aux_coefficient=0.3, z_coefficient=0.2)
    if layer.last_load is not None:
        layer.last_load.copy_(torch.tensor([5, 3, 0, 0]))
    x = torch.randn(4, 8, 6, dtype=torch.float64)
    ids = torch.arange(32).view(4, 8)
    padding = ids % 5 == 4

    def gradient(parts: list[slice], scale: float) -> torch.Tensor:
        """Of the router, where the loss is `scale` times the sum of y."""
        layer.zero_grad()
        counts = BatchCounts(num_groups=4, num_sequences=8, num_tokens=int((~padding).sum()))
        for part in parts:
            tokens = TokenContext(ids[part], padding[part], sequence_tokens=4, batch=counts)
            y, routing = layer(x[part], tokens)
            assert not routing.aux_loss.requires_grad
            (y.sum() * scale).backward()
        return layer.router.grad

    whole = gradient([slice(0, 4)], 0.0)
    logits = (x @ layer.router.detach()).requires_grad_()
    tokens = TokenContext(ids, padding, sequence_tokens=4)
    routing = route(logits, layer.spec, tokens, state=layer.state)
    (0.3 * routing.aux_loss + 0.2 * routing.z_loss).backward()
    torch.testing.assert_close(whole, torch.einsum("gsm,gse->me", x, logits.grad))
    torch.testing.assert_close(gradient([slice(0, 1), slice(1, 4)], 0.0), whole)
    with_y = gradient([slice(0, 4)], 1.0)
    layer.spec = layer.spec.model_copy(update={"aux_coefficient": 0.0, "z_coefficient": 0.0})
    torch.testing.assert_close(gradient([slice(0, 4)], 1.0) + whole, with_y)


def test_evaluation_has_no_auxiliary_gradient() -> None:
    layer = routed("softmax_topk", aux_coefficient=0.3)
    y, _ = layer(torch.randn(8, 6, dtype=torch.float64), TokenContext(training=False))
    (y.sum() * 0).backward()
    assert not layer.router.grad.any()


ONE_CHOICE: list[dict[str, object]] = [
    {"router": "switch_top1"},
    *({"router": "sigmoid_topk", "top_k": 1, "renormalize_gates": each} for each in (True, False)),
    *(
        {"router": "softmax_topk", "top_k": 1, "softmax": softmax, "renormalize_gates": each}
        for softmax in ("before_topk", "after_topk")
        for each in (True, False)
    ),
    {"router": "softmax_topk", "top_k": 1},
    {"router": "sigmoid_topk", "top_k": 1},
    {"router": "sinkhorn_topk", "top_k": 1},
    {"router": "expert_choice", "capacity_factor": 1.0},
]


@pytest.mark.parametrize("fields", ONE_CHOICE, ids=str)
def test_what_is_accepted_of_one_choice_trains_the_router(fields: dict) -> None:
    """By what the experts give, with no help of an auxiliary loss; and what is not accepted does not."""
    torch.manual_seed(0)
    layer = routed(**fields)
    layer.spec = layer.spec.model_copy(update={"aux_coefficient": 0.0})
    layer(torch.randn(16, 6, dtype=torch.float64))[0].square().sum().backward()
    accepted = layer.spec.never_trained() is None
    assert (layer.router.grad.abs().max() > 1e-3) == accepted
    assert accepted or layer.router.grad.abs().max() < 1e-12


def test_jitter_is_keyed_by_the_token_and_stays_within_bounds() -> None:
    torch.manual_seed(0)
    layer = routed("switch_top1", input_jitter=0.4, aux_coefficient=0.0)
    plain = routed("switch_top1", aux_coefficient=0.0)
    x = torch.randn(16, 6, dtype=torch.float64)
    ids = torch.arange(16)
    seen = layer._logits(x, ids, TokenContext(step=2))
    again = layer._logits(x[8:], ids[8:], TokenContext(step=2))
    assert torch.equal(seen[8:], again)
    assert not torch.equal(seen, layer._logits(x, ids, TokenContext(step=3)))
    far = (seen - plain._logits(x, ids, TokenContext())).abs()
    assert (far <= 0.4 * (x.abs() @ layer.router.abs())).all()
    assert far.min() > 0
    evaluated = TokenContext(training=False)
    assert torch.equal(layer._logits(x, ids, evaluated), plain._logits(x, ids, evaluated))


def test_a_step_is_remembered_only_when_it_ends() -> None:
    layer = routed("sigmoid_topk", bias_update_rate=0.1, aux_scope="global_batch", aux_coefficient=0.1)
    x = torch.randn(16, 6, dtype=torch.float64)
    _, routing = layer(x)
    assert not layer.router_bias.any()
    assert not layer.last_load.any()
    layer.end_step(routing.chosen)
    assert torch.equal(layer.last_load, routing.chosen)
    assert torch.equal(layer.router_bias > 0, routing.chosen < 8)
    assert set(layer.state_dict()) > {"router_bias", "last_load"}
    assert set(routed("switch_top1").state_dict()) == {"router", "experts.w_in", "experts.w_out"}


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_what_a_layer_returns_may_be_changed_in_place(coefficient: float) -> None:
    layer = routed("softmax_topk", aux_coefficient=coefficient)
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    y, _ = layer(x)
    y += x  # a residual
    y.sum().backward()
    assert x.grad is not None


def test_sequences_that_groups_cut_through_are_refused() -> None:
    layer = routed("softmax_topk", aux_scope="sequence")
    assert layer(torch.randn(4, 4, 6, dtype=torch.float64))[1].aux_loss > 0
    with pytest.raises(ValueError, match="groups of 8 tokens are not made of sequences of 12"):
        layer(torch.randn(4, 12, 6, dtype=torch.float64))


@pytest.mark.parametrize("gate", [False, True])
def test_shared_experts_add_what_they_give_to_every_token(gate: bool) -> None:
    layer = routed("switch_top1", activation="swiglu", shared_hidden_dim=5, shared_gate=gate)
    x = torch.randn(8, 6, dtype=torch.float64)
    y, _ = layer(x)
    shared, layer.shared = layer.shared, None
    expected = (torch.nn.functional.silu(x @ shared.w_gate) * (x @ shared.w_in)) @ shared.w_out
    if gate:
        expected = expected * (x @ shared.gate).sigmoid()
    torch.testing.assert_close(y, layer(x)[0] + expected)
