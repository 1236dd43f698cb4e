"""Every router against a reference of one token at a time, and the laws that all routers obey."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moe.routing import RoutingState, TokenContext, follow_load, route
from moe.routing.sinkhorn import transport_plan
from moe.spec import MoESpec
from tests.reference_routing import (
    admit,
    balancing_loss,
    best_of_close,
    capacity_of,
    choices_of,
    expert_choice,
    rounding,
    sigmoid,
    sinkhorn,
    softmax,
)

TOKEN_CHOICE = ["switch_top1", "softmax_topk", "sigmoid_topk"]


def spec_of(router: str, num_experts: int = 4, **fields: object) -> MoESpec:
    return MoESpec(router=router, num_experts=num_experts, model_dim=8, hidden_dim=8, **fields)  # type: ignore[arg-type]


@st.composite
def specs(draw: st.DrawFn, routers: list[str]) -> MoESpec:
    router = draw(st.sampled_from(routers))
    num_experts = draw(st.sampled_from([1, 2, 4, 6, 8]))
    fields: dict = {}
    if router == "expert_choice":
        return spec_of(router, num_experts, capacity_factor=draw(st.sampled_from([0.3, 1.0, 1.1, 2.0, 9.0])))
    fields["capacity_factor"] = draw(st.sampled_from([None, 0.3, 1.0, 1.1, 2.0]))
    fields["min_capacity"] = draw(st.sampled_from([0, 1, 3]))
    fields["drop_by"] = draw(st.sampled_from(["position", "probability"]))
    if router == "sparsemixer":
        fields["jitter_noise"] = draw(st.sampled_from([0.01, 0.5]))
        return spec_of(router, max(2, num_experts), **fields)
    if router in ("switch_top1", "softmax_topk", "sigmoid_topk"):
        fields["aux_scope"] = draw(st.sampled_from(["group", "sequence", "global_batch"]))
    if router != "switch_top1":
        fields["top_k"] = draw(st.integers(1, num_experts))
    if router == "softmax_topk":
        fields["softmax"] = draw(st.sampled_from(["before_topk", "after_topk"]))
    if router in ("softmax_topk", "sigmoid_topk"):
        fields["renormalize_gates"] = draw(st.booleans())
        fields["routed_scaling_factor"] = draw(st.sampled_from([1.0, 2.5]))
        groups = draw(st.sampled_from([g for g in (1, 2, 4) if num_experts % g == 0]))
        fields["num_expert_groups"] = groups
        fields["expert_groups_per_token"] = draw(st.integers(1, groups))
        fields["top_k"] = min(fields["top_k"], fields["expert_groups_per_token"] * num_experts // groups)
    return spec_of(router, num_experts, **fields)


@st.composite
def cases(draw: st.DrawFn, routers: list[str]) -> tuple[MoESpec, torch.Tensor, TokenContext, RoutingState]:
    spec = draw(specs(routers))
    groups, sequences, length = (draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 3)), draw(st.integers(1, 8)))
    shape = (groups, sequences * length)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(*shape, spec.num_experts, generator=generator, dtype=torch.float64)
    logits *= draw(st.sampled_from([0.0, 0.1, 1.0, 5.0]))
    if draw(st.booleans()):
        logits[..., 0] += 20  # all to one expert
    padding = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    tokens = TokenContext(torch.arange(padding.numel()).view(shape), padding, sequence_tokens=length)
    bias = torch.randn(spec.num_experts, generator=generator) if draw(st.booleans()) else None
    last = torch.randint(0, 9, (spec.num_experts,), generator=generator) if draw(st.booleans()) else None
    return spec, logits, tokens, RoutingState(bias, last)


def rows_of(routing, group: int, group_tokens: int) -> dict[tuple[int, int, int], float]:
    """The assignments of one group as (token in it, expert, place) -> weight."""
    flat = routing.assignments
    return {
        (token % group_tokens, expert, place): weight
        for token, expert, place, weight in zip(
            flat.token.tolist(), flat.expert.tolist(), flat.position.tolist(), flat.weight.tolist(), strict=True
        )
        if token // group_tokens == group
    }


def rows_by_token(routing) -> list[list[int]]:
    flat = routing.assignments
    starts = [*flat.first_by_token.tolist(), len(flat.rows_by_token)]
    return [flat.rows_by_token[a:b].tolist() for a, b in pairwise(starts)]


def assert_same_rows(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for place, weight in expected.items():
        assert actual[place] == pytest.approx(weight, rel=1e-12, abs=1e-12)


@given(cases(TOKEN_CHOICE))
def test_equals_the_paper_token_by_token(case: tuple) -> None:
    spec, logits, tokens, state = case
    routing = route(logits, spec, tokens, state=state)
    group_tokens = logits.shape[1]
    capacity = capacity_of(spec, group_tokens)
    assert routing.capacity == capacity == spec.routing.capacity(group_tokens, spec.num_experts)
    bias = state.bias.double().tolist() if state.bias is not None else None
    num_dropped, scopes = 0, []
    for g in range(logits.shape[0]):
        rows, padding = logits[g].tolist(), tokens.padding[g].tolist()
        choices = [None if pad else choices_of(spec, row, bias) for row, pad in zip(rows, padding, strict=True)]
        expected = admit(spec, choices, capacity, rounding(rows, padding))
        assert_same_rows(rows_of(routing, g, group_tokens), expected.weights)
        num_dropped += expected.num_dropped

        def probs(row: list[float]) -> list[float]:
            scores = [sigmoid(x) for x in row]
            return [s / sum(scores) for s in scores] if spec.routing.router == "sigmoid_topk" else softmax(row)

        scope = [None if c is None else (probs(row), c[0]) for row, c in zip(rows, choices, strict=True)]
        length = tokens.sequence_tokens if spec.routing.auxiliary_loss.scope == "sequence" else group_tokens
        scopes += [scope[start : start + length] for start in range(0, group_tokens, length)]
    num_choices = int((~tokens.padding).sum()) * spec.experts_per_token
    assert routing.num_choices == num_choices
    assert routing.dropped.item() == pytest.approx(num_dropped / max(1, num_choices))
    last = None
    if spec.routing.auxiliary_loss.scope == "global_batch":
        last = state.last_load.tolist() if state.last_load is not None else [0] * spec.num_experts
    assert routing.aux_loss.item() == pytest.approx(balancing_loss(spec.num_experts, scopes, last))


@given(cases(["expert_choice"]))
def test_experts_choose_the_tokens_with_the_highest_scores(case: tuple) -> None:
    spec, logits, tokens, state = case
    routing = route(logits, spec, tokens, state=state)
    for g in range(logits.shape[0]):
        expected = expert_choice(spec, logits[g].tolist(), tokens.padding[g].tolist())
        assert_same_rows(rows_of(routing, g, logits.shape[1]), expected.weights)
    assert (routing.load == routing.load[0]).all(), "all experts are exactly equally busy"
    assert routing.expert is routing.weight is routing.kept is routing.position is None


@given(cases(["sinkhorn_topk"]))
def test_sinkhorn_chooses_by_the_transport_plan(case: tuple) -> None:
    spec, logits, tokens, state = case
    assume(logits.abs().max() < 19)  # the reference uses Python floats
    log_plan = transport_plan(logits, ~tokens.padding, spec.routing.sinkhorn_iterations)
    routing = route(logits, spec, tokens, state=state)
    by_token = routing.expert.view(*logits.shape[:2], -1)
    for g in range(logits.shape[0]):
        expected = sinkhorn(logits[g].tolist(), tokens.padding[g].tolist(), spec.routing.sinkhorn_iterations)
        for s, row in enumerate(expected):
            if row is not None:
                actual = log_plan[g, s].softmax(-1)
                torch.testing.assert_close(actual, torch.tensor(row, dtype=torch.float64) / sum(row), rtol=1e-9, atol=0)
                assert by_token[g, s].tolist() == best_of_close(row, logits[g, s].tolist(), spec.routing.top_k)
    probs = logits.sigmoid() if spec.routing.top_k == 1 else logits.softmax(-1)
    weights = probs.flatten(0, 1).gather(1, routing.expert)
    torch.testing.assert_close(routing.weight, torch.where(routing.kept, weights, 0.0))


def test_sinkhorn_balances_what_softmax_would_not() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 512, 8, dtype=torch.float64)
    logits[..., 0] += 1.5
    plain = route(logits, spec_of("softmax_topk", 8, top_k=1))
    sinkhorn_routing = route(logits, spec_of("sinkhorn_topk", 8, top_k=1))
    assert plain.load.max() > 4 * 64
    assert sinkhorn_routing.load.max() < 1.5 * 64
    evaluation = route(logits, spec_of("sinkhorn_topk", 8, top_k=1), TokenContext(training=False))
    assert torch.equal(evaluation.expert, plain.expert)


EVERY_ROUTER = [*TOKEN_CHOICE, "sinkhorn_topk", "sparsemixer", "expert_choice"]


@given(cases(EVERY_ROUTER))
def test_buffers_hold_at_most_their_capacity(case: tuple) -> None:
    spec, logits, tokens, state = case
    routing = route(logits, spec, tokens, state=state)
    flat, group_tokens = routing.assignments, logits.shape[1]
    places = list(zip(flat.expert.tolist(), (flat.token // group_tokens).tolist(), flat.position.tolist(), strict=True))
    assert places == sorted(set(places)), "by expert, group and place, and no two in one"
    if routing.capacity is not None:
        assert all(place < routing.capacity for *_, place in places)
    assert routing.load.sum() == len(places)
    assert torch.equal(torch.bincount(flat.expert, minlength=spec.num_experts), routing.load)
    assert not tokens.padding.view(-1)[flat.token].any()
    assert routing.num_tokens == (~tokens.padding).sum()
    by_token = rows_by_token(routing)
    assert sorted(row for rows in by_token for row in rows) == list(range(len(places)))
    assert all(flat.token[row] == token for token, rows in enumerate(by_token) for row in rows)
    if routing.kept is not None:
        for token, rows in enumerate(by_token):
            is_kept = routing.kept[token]
            assert torch.equal(flat.expert[rows], routing.expert[token][is_kept])
            assert torch.equal(flat.weight[rows], routing.weight[token][is_kept])


@given(cases(EVERY_ROUTER), st.randoms(use_true_random=False))
def test_a_subset_of_groups_alone_is_routed_alike(case: tuple, random: object) -> None:
    spec, logits, tokens, state = case
    full = route(logits, spec, tokens, state=state)
    order = random.sample(range(logits.shape[0]), random.randint(1, logits.shape[0]))  # type: ignore[attr-defined]
    part = TokenContext(tokens.ids[order], tokens.padding[order], sequence_tokens=tokens.sequence_tokens)
    subset = route(logits[order], spec, part, state=state)
    for index, g in enumerate(order):
        assert rows_of(subset, index, logits.shape[1]) == rows_of(full, g, logits.shape[1])


@given(cases(EVERY_ROUTER), st.integers(1, 5))
def test_padding_changes_nothing(case: tuple, padding_length: int) -> None:
    """Neither the values of padding nor, where the capacity does not depend on it, its amount."""
    spec, logits, tokens, state = case
    routing = route(logits, spec, tokens, state=state)
    for fill in (7.0, float("inf"), float("nan")):
        padding_logits = torch.where(tokens.padding[..., None], fill, logits)
        result = route(padding_logits, spec, tokens, state=state)
        for g in range(logits.shape[0]):
            assert rows_of(result, g, logits.shape[1]) == rows_of(routing, g, logits.shape[1])
        assert torch.equal(result.aux_loss, routing.aux_loss)
        assert torch.equal(result.z_loss, routing.z_loss)
    if spec.routing.capacity_factor is not None and spec.routing.router != "expert_choice":
        return
    longer = torch.nn.functional.pad(logits, (0, 0, 0, padding_length), value=3.0)
    context = TokenContext(
        torch.nn.functional.pad(tokens.ids, (0, padding_length)),
        torch.nn.functional.pad(tokens.padding, (0, padding_length), value=True),
    )
    longer_routing = route(longer, spec, context, state=state)
    for g in range(logits.shape[0]):
        assert_same_rows(rows_of(longer_routing, g, longer.shape[1]), rows_of(routing, g, logits.shape[1]))


@given(cases(EVERY_ROUTER), st.integers(0, 2**31))
def test_rounding_does_not_choose_among_tokens_that_are_equal(case: tuple, seed: int) -> None:
    """As the first tokens of two documents are, or a repeated word at the beginning: each rank adds in another
    order."""
    spec, logits, tokens, state = case
    generator = torch.Generator().manual_seed(seed)
    group_tokens = logits.shape[1]
    repetition = logits[:, torch.randint(0, group_tokens, (group_tokens,), generator=generator)]
    noise = torch.rand(logits.shape, generator=generator, dtype=logits.dtype) - 0.5
    noisy = repetition * (1 + 8 * torch.finfo(logits.dtype).eps * noise)
    expected, actual = (route(scores, spec, tokens, state=state) for scores in (repetition, noisy))
    for g in range(logits.shape[0]):
        assert_same_rows(rows_of(actual, g, group_tokens), rows_of(expected, g, group_tokens))


@given(cases(EVERY_ROUTER))
def test_evaluation_drops_nothing(case: tuple) -> None:
    spec, logits, tokens, state = case
    routing = route(logits, spec, TokenContext(tokens.ids, tokens.padding, training=False), state=state)
    if spec.routing.router == "expert_choice":
        assert torch.equal(routing.assignments.token, route(logits, spec, tokens, state=state).assignments.token)
    else:
        assert routing.capacity is None
        assert routing.load.sum() == routing.num_choices


@pytest.mark.parametrize("router", EVERY_ROUTER)
def test_weights_have_the_gradient_of_their_definition_and_are_float32_at_least(router: str) -> None:
    torch.manual_seed(0)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    # A sampled choice has an estimated gradient (tests/language/test_sparsemixer.py).
    fields = {"training_choice": "highest", "jitter_noise": 0.5} if router == "sparsemixer" else {}

    def outcome(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routing = route(logits, spec_of(router, **fields), TokenContext(padding=padding))
        return routing.assignments.weight, routing.aux_loss, routing.z_loss

    assert torch.autograd.gradcheck(outcome, (torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True),))
    assert outcome(torch.randn(2, 6, 4).bfloat16())[0].dtype == torch.float32


def test_a_bias_follows_the_loads() -> None:
    bias = torch.zeros(4)
    follow_load(bias, torch.tensor([10, 2, 4, 0]), rate=0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.0, 0.5]


def test_the_load_of_the_last_step_stands_for_the_batch() -> None:
    """Halves of a batch, with the loads of the step before: their losses add up to the loss of the whole batch, and
    push tokens away from busy experts."""
    torch.manual_seed(0)
    spec = spec_of("softmax_topk", aux_scope="global_batch")
    state = RoutingState(last_load=torch.tensor([30, 10, 0, 0]))
    logits = torch.randn(4, 8, 4, dtype=torch.float64, requires_grad=True)
    full = route(logits, spec, state=state)
    halves = [route(part, spec, state=state) for part in logits.split(2)]
    mean_loss = sum(half.aux_loss * half.aux_units for half in halves) / full.aux_units
    torch.testing.assert_close(mean_loss, full.aux_loss)
    full.aux_loss.backward()
    assert (logits.grad[..., 0] > 0).all()
    assert (logits.grad[..., 2:] < 0).all()


@given(cases(TOKEN_CHOICE), st.integers(0, 9), st.sampled_from([torch.float32, torch.float64]))
def test_even_loads_have_no_gradient(case: tuple, load: int, dtype: torch.dtype) -> None:
    """Exactly zero: an optimizer may turn the smallest rounding error into a full step."""
    spec, logits, tokens, state = case
    even = None if state.last_load is None else torch.full_like(state.last_load, load)
    state = RoutingState(state.bias, even)
    logits = logits.to(dtype).requires_grad_()
    assume(spec.routing.auxiliary_loss.scope == "global_batch" or spec.experts_per_token == spec.num_experts)
    loss = route(logits, spec, tokens, state=state).aux_loss
    assert loss == (not tokens.padding.all())
    loss.backward()
    assert not logits.grad.any()


def test_entropy_is_that_of_the_probabilities() -> None:
    certain = torch.zeros(1, 3, 4)
    certain[..., 1] = 200
    for logits, expected in ((torch.zeros(1, 3, 4), math.log(4)), (certain, 0.0)):
        assert route(logits, spec_of("softmax_topk")).entropy.item() == pytest.approx(expected, abs=1e-6)
