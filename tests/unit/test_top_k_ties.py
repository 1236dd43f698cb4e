"""Ties in top-k: rounding never decides them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.routing import TokenContext, route
from moe.routing.selection import logistic, top_k, top_k_within
from moe.spec import MoESpec


def sinkhorn(num_experts: int, top_k: int) -> MoESpec:
    return MoESpec(router="sinkhorn_topk", num_experts=num_experts, top_k=top_k, model_dim=8, hidden_dim=8)


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, 2.0, -torch.inf]), min_size=5, max_size=5), min_size=1),
    st.integers(1, 5),
)
def test_top_k_takes_the_lower_index_of_equals(rows: list[list[float]], k: int) -> None:
    expected = [sorted(range(5), key=lambda e: (-row[e], e))[:k] for row in rows]
    assert top_k(torch.tensor(rows), k).tolist() == expected


@st.composite
def tied_logits(draw: st.DrawFn) -> torch.Tensor:
    """Logits `[1, S, E]` of a group: a single token, equal tokens or any, with logits equal or at least 1e-9 apart."""
    num_tokens, num_experts = draw(st.sampled_from([1, 2, 3, 8, 64])), draw(st.sampled_from([2, 3, 8]))
    rows = 1 if draw(st.booleans()) else min(num_tokens, 4)
    far, close = (
        torch.tensor(draw(st.lists(st.sampled_from(values), min_size=rows * num_experts, max_size=rows * num_experts)))
        for values in ([-1.5, 0.0, 0.25, 4.0], [0, 1, 2])
    )  # fmt: skip
    scores = (far.double() + 1e-9 * close).view(rows, num_experts)
    return scores[torch.tensor(draw(st.lists(st.integers(0, rows - 1), min_size=num_tokens, max_size=num_tokens)))][
        None
    ]


@given(tied_logits(), st.integers(1, 3), st.integers(0, 2**31), st.integers(0, 3))
def test_rounding_decides_no_tie_of_sinkhorns(logits: torch.Tensor, top_k: int, seed: int, num_padding: int) -> None:
    spec = sinkhorn(logits.shape[-1], min(top_k, logits.shape[-1]))
    generator = torch.Generator().manual_seed(seed)
    moves = 1 + 2e-15 * (2 * torch.rand(logits.shape, dtype=torch.float64, generator=generator) - 1)
    expert = route(logits, spec).expert
    assert torch.equal(route(logits * moves, spec).expert, expert)
    longer = torch.nn.functional.pad(logits * moves, (0, 0, 0, num_padding), value=9.0)
    context = TokenContext(padding=torch.arange(longer.shape[1])[None] >= logits.shape[1])
    assert torch.equal(route(longer, spec, context).expert[: expert.shape[0]], expert)


def test_sinkhorns_ties_go_to_the_higher_logit_then_to_the_lower_index() -> None:
    """All experts of a single token get equal mass, and so do all experts of tokens that are all equal."""
    row = torch.tensor([0.5, 2.0, 2.0 + 1e-9, 2.0, -1.0, 2.0 + 1e-9], dtype=torch.float64)
    for num_tokens in (1, 64):
        routing = route(row.expand(1, num_tokens, 6), sinkhorn(6, 4))
        assert routing.expert.tolist() == [[2, 5, 1, 3]] * num_tokens


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_close_scores_are_equal_ones(rows: list[list[int]], tie_breakers: list[int], k: int, random) -> None:
    expected = [sorted(range(5), key=lambda e: (-row[e], -tie_breakers[e], e))[:k] for row in rows]
    close, second = (
        torch.tensor([[score + random.uniform(0, 1e-6) for score in row] for row in values])
        for values in (rows, [tie_breakers] * len(rows))
    )
    tolerance = torch.full((len(rows), 1), 1e-5)
    assert top_k_within(close, k, tolerance, second).tolist() == expected


@given(
    st.floats(-30, 30, width=32), st.integers(1, 70), st.integers(2, 13),
    st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_equal_logits_have_equal_sigmoids_wherever_they_stand(logit, num_tokens, num_experts, dtype) -> None:
    logits = torch.full((1, num_tokens, num_experts), logit, dtype=dtype)
    spec = MoESpec(
        router="sigmoid_topk", num_experts=num_experts, top_k=2, model_dim=8, hidden_dim=8, renormalize_gates=False
    )  # fmt: skip
    routing = route(logits, spec)
    assert routing.expert.tolist() == [[0, 1]] * num_tokens
    weight = route(logits[:, :1], spec).weight[0, 0]
    assert routing.weight.unique().tolist() == [float(weight)]
    assert torch.allclose(
        weight.double(),
        torch.tensor(float(logits[0, 0, 0])).double().sigmoid(),
        rtol=4e-7 if dtype == torch.float32 else 2e-15,
    )


def test_the_logistic_function_has_its_derivative() -> None:
    x = torch.tensor([-800.0, -30.0, -1.0, -1e-9, 0.0, 0.5, 40.0, 800.0], dtype=torch.float64, requires_grad=True)
    logistic(x).sum().backward()
    gradient, x.grad = x.grad, None
    x.sigmoid().sum().backward()
    torch.testing.assert_close(gradient, x.grad, rtol=1e-14, atol=1e-300)
