"""Selection of tokens and attention to them, against plain computations, query by query."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe.layers import sparse_attention
from moe.layers.attention_mask import AttentionMask
from moe.layers.sparse_attention import (
    IndexScores,
    TargetAttention,
    attend_to_gathered,
    attend_to_selected,
    indexer_divergence,
    select_tokens,
)
from moe.parallel import SequenceShard

ROWS, LENGTH = 2, 11
DOCUMENTS = torch.tensor([[0] * 11, [0] * 4 + [1] * 5 + [-1] * 2])
MASKS: dict[str, dict[str, Any]] = {
    "one document": {}, "packed documents": {"documents": DOCUMENTS}, "left padding": {"first": torch.tensor([0, 3])},
}  # fmt: skip


@pytest.fixture(autouse=True, params=[3, 256])
def _queries_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention, "QUERIES_AT_ONCE", request.param)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def index_scores(num_queries: int = LENGTH, heads: int = 2, *, are_coarse: bool = False) -> IndexScores:
    """Scores of the last queries; many of them equal if `are_coarse`."""
    queries, keys, weights = (
        draw(ROWS, heads, num_queries, 3), draw(ROWS, LENGTH, 3, seed=1), draw(ROWS, num_queries, heads)
    )  # fmt: skip
    if are_coarse:
        queries, keys, weights = (tensor.round() for tensor in (queries, keys, weights))
    return IndexScores(queries, keys, weights, LENGTH - num_queries)


def score(scores: IndexScores, row: int, query: int, key: int) -> float:
    """Equation 1."""
    products = (scores.queries[row, :, query] @ scores.keys[row, key]).relu() * 3**-0.5
    return float((scores.head_weights[row, query] * products).sum())


def visible(mask: AttentionMask, row: int, query: int) -> list[int]:
    keys = torch.arange(LENGTH)
    return mask.is_visible(keys[:, None], keys[None]).expand(ROWS, -1, -1, -1)[row, 0, query].nonzero()[:, 0].tolist()


def chosen(selection: Tensor, row: int, query: int) -> list[int]:
    places = selection[row, query].tolist()
    assert places == sorted(places)
    return [place for place in places if place >= 0]


@pytest.mark.parametrize("num_queries", [LENGTH, 2])
@pytest.mark.parametrize("top_k", [1, 4, 30])
@pytest.mark.parametrize("kind", MASKS)
def test_the_highest_scores_are_selected_and_of_equal_ones_the_earliest(
    kind: str, top_k: int, num_queries: int
) -> None:
    mask, ties = AttentionMask(**MASKS[kind]), 0
    scores = index_scores(num_queries, are_coarse=True)
    selection = select_tokens(scores, top_k, mask)
    for row in range(ROWS):
        for query in range(num_queries):
            keys = visible(mask, row, scores.first + query)
            values = {key: round(score(scores, row, query, key), 9) for key in keys}
            expected = sorted(keys, key=lambda key: (-values[key], key))[:top_k]
            ties += len(set(values.values())) < len(keys)
            assert chosen(selection, row, query) == sorted(expected)
    assert ties > num_queries / 2


def attend_plainly(queries: Tensor, keys: Tensor, values: Tensor, selection: Tensor, scale: float) -> Tensor:
    rows = []
    for row in range(ROWS):
        outputs = []
        for query in range(queries.shape[2]):
            places = chosen(selection, row, query)
            shares = (torch.einsum("nd,nld->nl", queries[row, :, query], keys[row][:, places]) * scale).softmax(-1)
            outputs.append(torch.einsum("nl,nld->nd", shares, values[row][:, places]))
        rows.append(torch.stack(outputs, 1))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", MASKS)
def test_queries_attend_to_selected_tokens_alone(kind: str) -> None:
    """By masks, or gathered for keys and values that all heads share; values narrower than keys, and wider."""
    mask = AttentionMask(**MASKS[kind])
    for num_queries, width in ((LENGTH, 3), (LENGTH, 7), (1, 3), (4, 3)):
        selection = select_tokens(index_scores(num_queries), 4, mask)
        inputs = [draw(ROWS, 4, num_queries, 5), draw(ROWS, LENGTH, 5), draw(ROWS, LENGTH, width)]
        inputs = [tensor.requires_grad_() for tensor in inputs]
        queries, keys, values = inputs[0], *(tensor[:, None].expand(-1, 4, -1, -1) for tensor in inputs[1:])
        expected = attend_plainly(queries, keys, values, selection, 0.4)
        upstream = draw(*expected.shape)
        reference = torch.autograd.grad(expected, inputs, upstream)
        masked = attend_to_selected(queries, keys, values, selection, scale=0.4)
        gathered = attend_to_gathered(*inputs, selection, scale=0.4)
        for outputs in (masked, gathered):
            torch.testing.assert_close(outputs, expected, rtol=1e-10, atol=1e-12)
            for gradient, by_hand in zip(torch.autograd.grad(outputs, inputs, upstream), reference, strict=True):
                torch.testing.assert_close(gradient, by_hand, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("kind", MASKS)
def test_the_divergence_and_its_gradients_are_those_of_the_two_distributions(kind: str, is_sparse: bool) -> None:
    """Equations 3 and 4, by autograd on plain distributions of each query."""
    mask, scores = AttentionMask(**MASKS[kind]), index_scores(heads=3)
    factors = [tensor.requires_grad_() for tensor in (scores.queries, scores.keys, scores.head_weights)]
    selection = select_tokens(scores, 4, mask) if is_sparse else None
    queries, keys = draw(ROWS, 2, LENGTH, 5), draw(ROWS, 2, LENGTH, 5)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(ROWS):
        for query in range(LENGTH):
            places = visible(mask, row, query) if selection is None else chosen(selection, row, query)
            weights = (torch.einsum("nd,nld->nl", queries[row, :, query], keys[row][:, places]) * 0.4).softmax(-1)
            target = weights.sum(0) / weights.sum()
            products = (factors[0][row, :, query] @ factors[1][row, places].T).relu() * 3**-0.5
            shares = (factors[2][row, query, :, None] * products).sum(0).softmax(-1)
            total = total + (target * (target / shares).log()).sum()
    target_attention = TargetAttention(queries, keys, 0.4, 2, mask, selection, SequenceShard(LENGTH))
    divergence = indexer_divergence(scores, target_attention)
    torch.testing.assert_close(divergence, total, rtol=1e-10, atol=1e-12)
    assert float(divergence.detach()) > 0.1
    reference = torch.autograd.grad(total, factors)
    for gradient, by_hand in zip(torch.autograd.grad(3 * divergence, factors), reference, strict=True):
        torch.testing.assert_close(gradient, 3 * by_hand, rtol=1e-9, atol=1e-11)
