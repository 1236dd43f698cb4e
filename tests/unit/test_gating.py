"""Top-2 gating against the paper's algorithm, one token at a time, and its laws."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.random import Purpose, fold, gumbel, uniform
from moe.routing import TokenContext, route
from moe.spec import MoESpec
from tests.reference_gating import capacity_of, gate_group


def spec_of(num_experts: int = 4, **fields: object) -> MoESpec:
    return MoESpec(num_experts=num_experts, model_dim=8, hidden_dim=8, **fields)  # type: ignore[arg-type]


FIELDS: dict[str, list[Any]] = {
    "capacity_factor": [0.0, 0.3, 1.0, 2.0, 8.0], "capacity_rule": ["released", "paper"], "min_capacity": [1, 2, 4],
    "second_expert": ["all", "sampling", "random"], "second_expert_threshold": [0.0, 0.5, 1.0],
    "rejected_second_takes_slot": [False, True], "aux_form": ["e_squared", "paper"],
    "normalize_gates": ["before_drop", "after_drop"],
}  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> tuple[MoESpec, torch.Tensor, TokenContext]:
    num_experts = draw(st.sampled_from([1, 2, 3, 4, 8]))
    groups, tokens = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 24))
    fields = {name: draw(st.sampled_from(choices)) for name, choices in FIELDS.items()}
    spec = spec_of(num_experts, **fields)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(groups, tokens, num_experts, generator=generator, dtype=torch.float64)
    logits *= draw(st.sampled_from([0.0, 0.1, 1.0, 5.0]))
    if draw(st.booleans()):
        logits[..., 0] += 20  # all to one expert
    padding = torch.rand(groups, tokens, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    ids = torch.randperm(groups * tokens * 3, generator=generator)[: groups * tokens].view(groups, tokens)
    return (spec, logits, TokenContext(ids, padding, step=draw(st.integers(0, 9)), seed=draw(st.integers(0, 9))))


def runner_up(logits: torch.Tensor, spec: MoESpec, tokens: TokenContext, layer: int) -> torch.Tensor:
    scores = logits.softmax(-1)
    first = scores.argmax(-1, keepdim=True)
    if spec.routing.second_expert == "sampling":
        key = fold(fold(tokens.seed, tokens.step, layer), Purpose.GUMBEL)
        scores = logits + gumbel(key, tokens.ids, spec.num_experts)
    return scores.scatter(-1, first, -torch.inf).argmax(-1)


@given(cases())
def test_equals_algorithm_1_token_by_token(case: tuple[MoESpec, torch.Tensor, TokenContext]) -> None:
    spec, logits, tokens = case
    layer = 5
    routing = route(logits, spec, tokens, layer)
    logits = logits.masked_fill(tokens.padding[..., None], 0.0)  # the value that padding counts as
    groups, group_tokens, num_experts = logits.shape
    per_token = min(2, num_experts)
    capacity = capacity_of(spec, group_tokens)
    assert routing.capacity == capacity == spec.routing.capacity(group_tokens, spec.num_experts)
    draws = uniform(fold(fold(tokens.seed, tokens.step, layer), Purpose.SECOND_EXPERT), tokens.ids)
    second = runner_up(logits, spec, tokens, layer)
    expert, weight, is_kept, position = (
        x.view(groups, group_tokens, per_token)
        for x in (routing.expert, routing.weight, routing.kept, routing.position)
    )
    num_rejected = num_dropped = real = 0
    aux = 0.0
    for g in range(groups):
        expected = gate_group(
            logits[g].softmax(-1).tolist(), tokens.padding[g].tolist(), draws[g].tolist(), second[g].tolist(),
            spec, capacity,
        )  # fmt: skip
        assert expert[g].tolist() == expected.experts
        assert is_kept[g].tolist() == expected.is_kept
        for s in range(group_tokens):
            for k in range(per_token):
                if expected.positions[s][k] >= 0 and expected.is_kept[s][k]:
                    assert position[g, s, k] == expected.positions[s][k]
        torch.testing.assert_close(weight[g], torch.tensor(expected.weights, dtype=torch.float64))
        num_rejected += expected.num_rejected
        num_dropped += expected.num_dropped
        real += expected.real
        aux += expected.aux_loss / groups
    choices = max(1, real * per_token)
    assert routing.aux_loss.item() == pytest.approx(aux, abs=1e-12)
    assert routing.rejected.item() == pytest.approx(num_rejected / choices)
    assert routing.dropped.item() == pytest.approx(num_dropped / choices)


@given(cases())
def test_experts_accept_each_choice_once_within_their_capacity(
    case: tuple[MoESpec, torch.Tensor, TokenContext],
) -> None:
    spec, logits, tokens = case
    routing = route(logits, spec, tokens)
    group_tokens = logits.shape[1]
    flat = routing.assignments
    places = list(zip((flat.token // group_tokens).tolist(), flat.expert.tolist(), flat.position.tolist(), strict=True))
    assert len(set(places)) == len(places), "two tokens in one place"
    assert all(position < routing.capacity for _, _, position in places)
    assert routing.load.sum() == len(places) == int(routing.kept.sum())
    assert torch.equal(torch.bincount(flat.expert, minlength=spec.num_experts), routing.load)
    assert torch.equal(flat.expert, flat.expert.sort(stable=True).values)
    assert not routing.kept.view(-1, routing.kept.shape[-1])[tokens.padding.view(-1)].any()
    # The flat rows and the view by token are the same choices.
    assert torch.equal(flat.weight[flat.rows_by_token], routing.weight[routing.kept])
    assert torch.equal(flat.expert[flat.rows_by_token], routing.expert[routing.kept])
    assert torch.equal(flat.first_by_token, routing.kept.sum(1).cumsum(0) - routing.kept.sum(1))


@given(cases())
def test_groups_are_independent(case: tuple[MoESpec, torch.Tensor, TokenContext]) -> None:
    """A group routed alone has the same choices; the load is the sum over groups."""
    spec, logits, tokens = case
    routing, load = route(logits, spec, tokens), 0
    for g, group_tokens in ((g, logits.shape[1]) for g in range(logits.shape[0])):
        context = TokenContext(tokens.ids[g : g + 1], tokens.padding[g : g + 1], tokens.step, tokens.seed)
        group_routing, rows = route(logits[g : g + 1], spec, context), slice(g * group_tokens, (g + 1) * group_tokens)
        for name in ("expert", "weight", "kept"):
            torch.testing.assert_close(getattr(group_routing, name), getattr(routing, name)[rows])
        load += group_routing.load
    assert torch.equal(load, routing.load)


@pytest.mark.parametrize("normalize", ["before_drop", "after_drop"])
def test_padding_changes_nothing_for_real_tokens(normalize: str) -> None:
    torch.manual_seed(0)
    spec = spec_of(4, normalize_gates=normalize, capacity_factor=0.0, min_capacity=5)  # C is held at 5
    logits = torch.randn(2, 12, 4, dtype=torch.float64)
    ids = torch.arange(24).view(2, 12)
    plain = route(logits, spec, TokenContext(ids, torch.zeros(2, 12, dtype=torch.bool)))
    padded_ids = torch.cat((ids, torch.full((2, 3), 99)), 1)
    padding = torch.zeros(2, 15, dtype=torch.bool)
    padding[:, 12:] = True
    aux_losses = []
    for garbage in (0.0, 50.0):
        padded_logits = torch.cat((logits, torch.full((2, 3, 4), garbage, dtype=torch.float64)), 1)
        padded_logits[:, 12:, 1] += garbage
        with_padding = route(padded_logits, spec, TokenContext(padded_ids, padding))
        for name in ("expert", "kept", "weight", "position"):
            torch.testing.assert_close(getattr(with_padding, name)[~padding.view(-1)], getattr(plain, name))
        assert torch.equal(with_padding.load, plain.load)
        if normalize == "after_drop":
            torch.testing.assert_close(with_padding.aux_loss, plain.aux_loss, rtol=1e-5, atol=0)
        aux_losses.append(with_padding.aux_loss)
    assert torch.equal(*aux_losses)


def test_auxiliary_loss_of_uniform_and_of_collapsed_routing() -> None:
    even, one_expert = torch.zeros(2, 1, 8, 4, dtype=torch.float64)
    even[0, torch.arange(8), torch.arange(8) % 4] = 1e-9  # a tie that breaks evenly
    one_expert[..., 2] = 50
    for logits, expected in ((even, 1.0), (one_expert, 4.0)):
        assert route(logits, spec_of(4)).aux_loss.item() == pytest.approx(expected)
        assert route(logits, spec_of(4, aux_form="paper")).aux_loss.item() == pytest.approx(expected / 16)


def test_random_second_expert_is_kept_with_probability_twice_its_gate() -> None:
    logits = torch.tensor([2.0, 0.5, -9.0, -9.0], dtype=torch.float64).expand(1, 40_000, 4)
    spec = spec_of(4, capacity_factor=8.0)
    routing = route(logits, spec)
    p = logits[0, 0].softmax(-1)
    gate = (p[1] / (p[0] + p[1])).item()
    assert 1 - 2 * routing.rejected.item() == pytest.approx(2 * gate, abs=0.01)
    assert torch.equal(route(logits, spec).kept, routing.kept)
    variants = (
        route(logits, spec, TokenContext(step=1)),
        route(logits, spec, TokenContext(seed=1)),
        route(logits, spec, layer=1),
    )
    assert not any(torch.equal(variant.kept, routing.kept) for variant in variants)


def test_sampling_draws_the_second_expert_from_the_softmax_without_the_first() -> None:
    logits = torch.tensor([3.0, 1.0, 0.0, -1.0], dtype=torch.float64).expand(1, 40_000, 4)
    routing = route(logits, spec_of(4, second_expert="sampling", capacity_factor=8.0))
    shares = torch.bincount(routing.expert[:, 1], minlength=4).double() / 40_000
    expected = torch.tensor([-torch.inf, 1.0, 0.0, -1.0], dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(shares, expected, atol=0.01, rtol=0)


def test_evaluation_drops_nothing_and_draws_nothing() -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, 32, 4)
    logits[..., 0] += 10
    for policy in ("all", "sampling", "random"):
        spec = spec_of(4, capacity_factor=0.5, second_expert=policy)
        routing = route(logits, spec, TokenContext(training=False))
        assert routing.capacity is None
        assert routing.kept.all()
        assert routing.dropped == routing.rejected == 0
        assert torch.equal(routing.expert[:, 1], logits.view(-1, 4).topk(2).indices[:, 1])


def test_no_tokens_other_experts_and_bfloat16_logits() -> None:
    routing = route(torch.randn(0, 6, 4, requires_grad=True), spec_of(4))
    assert routing.load.tolist() == [0, 0, 0, 0]
    assert routing.aux_loss == 0
    routing.aux_loss.backward()
    assert route(torch.randn(1, 8, 4).bfloat16(), spec_of(4)).weight.dtype == torch.float32
    with pytest.raises(ValueError, match=r"\(2, 3, 5\) must be \[groups, tokens per group, 4 experts\]"):
        route(torch.randn(2, 3, 5), spec_of(4))


def test_z_loss_is_the_mean_square_of_the_logsumexp_over_real_tokens() -> None:
    logits = torch.randn(1, 6, 4, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False, False, False, True, False, True]])
    z_loss = route(logits, spec_of(4), TokenContext(torch.arange(6)[None], padding)).z_loss
    torch.testing.assert_close(z_loss, logits[~padding].logsumexp(-1).square().mean())
    z_loss.backward()
    assert (logits.grad[~padding] != 0).all()
    assert (logits.grad[padding] == 0).all()
