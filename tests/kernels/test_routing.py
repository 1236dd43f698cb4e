"""Top-k routing by kernels against the routers."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.dispatch import EinsumDispatcher
from moe.layers import MoELayer
from moe.layers.kernel_routing import route_by_kernels
from moe.routing import BatchCounts, Routing, RoutingState, TokenContext, build_router
from moe.routing.balance import with_auxiliary_losses
from moe.routing.recording import record_routing, replay_routing
from moe.spec import MoESpec
from tests.kernels.cases import DEVICE
from tests.kernels.enabled import kernels_everywhere


@dataclass(frozen=True)
class Case:
    spec: MoESpec
    logits: Tensor
    tokens: TokenContext
    state: RoutingState
    d_weight: Tensor


@st.composite
def routed(draw: st.DrawFn) -> Case:
    """Routers with groups of experts, biases, capacity, padding, ties and every scope of balancing."""
    num_expert_groups = draw(st.sampled_from((1, 1, 2, 4)))
    num_experts = draw(st.sampled_from((8, 16) if num_expert_groups > 1 else (1, 3, 8, 20)))
    groups_per_token = draw(st.integers(1, num_expert_groups))
    top_k = draw(st.integers(1, min(4, groups_per_token * (num_experts // num_expert_groups))))
    is_softmax, group_tokens = draw(st.booleans()), draw(st.sampled_from((4, 20, 48)))
    scope = draw(st.sampled_from(("group", "sequence", "global_batch")))
    spec = MoESpec(
        num_experts=num_experts, model_dim=8, hidden_dim=8, group_tokens=group_tokens, top_k=top_k,
        router="softmax_topk" if is_softmax else "sigmoid_topk", num_expert_groups=num_expert_groups,
        expert_groups_per_token=groups_per_token, aux_scope=scope, aux_coefficient=0.1, bias_update_rate=0.0,
        z_coefficient=draw(st.sampled_from((0.0, 0.01))),
        renormalize_gates=top_k > 1 and draw(st.booleans()), selection_bias=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from((1.0, 2.5))),
        capacity_factor=draw(st.sampled_from((None, None, 0.3, 1.0, 2.0))),
        **({"softmax": draw(st.sampled_from(("before_topk", "after_topk")))} if is_softmax and top_k > 1 else {}),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(0, 3)), group_tokens)
    logits = torch.randn(*shape, num_experts, generator=generator)
    if draw(st.booleans()):
        logits = (2 * logits).round() / 2  # ties
    padding = torch.rand(shape, generator=generator) < draw(st.sampled_from((0.0, 0.3, 1.0)))
    bias = 0.1 * torch.randn(num_experts, generator=generator) if spec.routing.has_selection_bias else None
    batch_tokens = 99, torch.tensor(99, device=DEVICE)
    last_load = torch.randint(0, 9, (num_experts,), generator=generator) if draw(st.booleans()) else None
    return Case(
        spec,
        logits.to(DEVICE),
        TokenContext(
            padding=padding.to(DEVICE),
            sequence_tokens=draw(st.sampled_from((None, group_tokens // 2))),
            batch=draw(st.sampled_from((None, *(BatchCounts(7, 14, num_tokens) for num_tokens in batch_tokens)))),
        ),
        RoutingState(*(None if tensor is None else tensor.to(DEVICE) for tensor in (bias, last_load))),
        torch.randn(shape[0] * shape[1], top_k, generator=generator).to(DEVICE),
    )


def gradient(routing: Routing, logits: Tensor, d_weight: Tensor) -> Tensor:
    assert routing.weight is not None
    loss = (routing.weight * d_weight).sum() + 0.3 * routing.aux_loss + 0.2 * routing.z_loss
    return torch.autograd.grad(loss, logits, retain_graph=True)[0]


@given(routed())
def test_routing_and_gradients_are_those_of_the_router(case: Case) -> None:
    router = build_router(case.spec)
    exact_logits, logits = case.logits.double().requires_grad_(), case.logits.clone().requires_grad_()
    exact = router(exact_logits, case.tokens, 1, case.state)
    with kernels_everywhere():
        by_kernels = route_by_kernels(router, case.spec, logits, case.tokens, case.state)
    assert by_kernels is not None
    for name in ("expert", "kept", "position", "load", "chosen", "num_tokens", "num_choices", "aux_units"):
        assert torch.equal(getattr(by_kernels, name), getattr(exact, name)), name
    assert (by_kernels.num_groups, by_kernels.capacity) == (exact.num_groups, exact.capacity)
    for name in ("weight", "aux_loss", "z_loss", "entropy", "rejected", "dropped"):
        torch.testing.assert_close(
            getattr(by_kernels, name).double(), getattr(exact, name), rtol=2e-5, atol=2e-6, msg=name
        )
    torch.testing.assert_close(
        gradient(by_kernels, logits, case.d_weight).double(),
        gradient(exact, exact_logits, case.d_weight),
        rtol=1e-4,
        atol=2e-6,
    )
    # The layer adds its share of the weighted losses.
    x = torch.ones(2, 2, requires_grad=True)
    with_losses = (
        with_auxiliary_losses(x, routing, case.spec, case.tokens, num_ranks=2) for routing in (by_kernels, exact)
    )
    ours, theirs = (
        torch.autograd.grad(y.sum(), leaf)[0] for y, leaf in zip(with_losses, (logits, exact_logits), strict=True)
    )
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=2e-6)


def test_recorded_choices_are_replayed() -> None:
    """Routers that record or replay take their own way; others may take the kernels'."""
    spec = MoESpec(num_experts=4, model_dim=8, hidden_dim=8, group_tokens=6, router="softmax_topk", top_k=2)
    layer = MoELayer(spec, layer=1).to(DEVICE)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with kernels_everywhere():
        with record_routing(layer) as recording:
            first, routing = layer(x)
        other = (recording[1] + 1) % 4
        with replay_routing(layer, {1: other}):
            second, replayed = layer(x)
    assert routing.expert is not None
    assert replayed.expert is not None
    assert torch.equal(recording[1], routing.expert)
    assert torch.equal(replayed.expert, other)
    assert not torch.equal(first, second)


def test_rows_of_choices_by_kernels_have_their_positions() -> None:
    """`EinsumDispatcher` places rows by position."""
    spec = MoESpec(num_experts=4, model_dim=8, hidden_dim=8, group_tokens=6, router="softmax_topk", top_k=2)
    layer = MoELayer(spec, layer=1).to(DEVICE)
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected, plain = layer(x)
    layer.dispatch = EinsumDispatcher(spec.group_tokens)
    with kernels_everywhere():
        y, routing = layer(x)
    torch.testing.assert_close(y, expected)
    assert torch.equal(routing.assignments.position, plain.assignments.position)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets the kernels
def test_nan_logits_choose_as_torch_does() -> None:
    logits = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    logits[0, 1, 5] = logits[0, 2] = float("nan")
    logits[0, 3, 2:] = -torch.inf
    spec = MoESpec(num_experts=8, model_dim=8, hidden_dim=8, router="softmax_topk", top_k=3)
    router = build_router(spec)
    with kernels_everywhere():
        routing = route_by_kernels(router, spec, logits.to(DEVICE), TokenContext(training=False), RoutingState())
    assert routing is not None
    assert routing.expert is not None
    assert routing.weight is not None
    assert routing.expert[1, 0] == 5
    assert all(len(set(row)) == 3 for row in routing.expert.tolist())
    assert routing.weight.isnan().any(1).tolist() == [False, True, True, False]
