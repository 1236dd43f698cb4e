"""Dispatch by sorted rows against GShard's einsums with the full mask: outputs and every gradient."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.dispatch import EinsumDispatcher, LocalDispatcher, combine_weights
from moe.dispatch.dispatcher import (
    _chunks,
    _order_by_chunk,
    min_chunks,
    pad_assignments,
    rows_to_tokens,
    tokens_to_rows,
)
from moe.dispatch.exchange import SortedChunk, _pack, _unpack, expert_and_rank_order
from moe.dispatch.hierarchical import deduplicate_by_node
from moe.experts import BACKENDS, LocalComputation
from moe.experts.activation import ACTIVATIONS
from moe.experts.experts import Cost
from moe.experts.products import padded_slots
from moe.layers import MoELayer, TokenContext
from moe.routing import Routing, route
from moe.spec import MoESpec


def layer_of(num_experts: int = 4, **fields: Any) -> MoELayer:
    if fields.get("router") != "expert_choice":
        fields = {"min_capacity": 1, **fields}
    spec = MoESpec(num_experts=num_experts, model_dim=6, hidden_dim=10, **fields)
    return MoELayer(spec, layer=2, dtype=torch.float64)


def routing_of(seed: int, tokens: int, experts: int = 8, **fields: Any) -> Routing:
    """The default router drops some of each token's two choices."""
    torch.manual_seed(seed)
    fields = fields or {"capacity_factor": 1.0, "min_capacity": 1}
    spec = MoESpec(num_experts=experts, model_dim=3, hidden_dim=3, **fields)
    return route(torch.randn(1, tokens, experts, dtype=torch.float64), spec)


def random_rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


seeds, numbers_of_tokens = st.integers(0, 2**31), st.integers(1, 30)
FIELDS: list[dict[str, Any]] = [
    {"capacity_factor": 1.0},
    {"capacity_factor": 0.0},
    {"capacity_factor": 8.0},
    {"num_experts": 1},
    {"rejected_second_takes_slot": True},
    {"router": "switch_top1"},
    {"router": "softmax_topk", "top_k": 3},
    {"router": "softmax_topk", "capacity_factor": 0.7},
    {"router": "sigmoid_topk", "capacity_factor": 0.7, "drop_by": "probability"},
    {"router": "sinkhorn_topk"},
    {"router": "sparsemixer", "jitter_noise": 0.5, "capacity_factor": 0.8},
    {"router": "expert_choice"},
    {"router": "sigmoid_topk", "apply_gates_to": "inputs", "activation": "swiglu", "capacity_factor": 0.8},
    {"router": "expert_choice", "apply_gates_to": "inputs", "activation": "swiglu", "expert_bias": True},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_sorted_rows_equal_the_einsums(fields: dict[str, Any], training: bool) -> None:
    torch.manual_seed(0)
    layer, x = layer_of(**fields), torch.randn(2, 16, 6, dtype=torch.float64)
    tokens = TokenContext(torch.arange(32).view(2, 16), torch.rand(2, 16) < 0.2, training=training)
    results = []
    cases = [(EinsumDispatcher(16), "segments"), (LocalDispatcher(), "segments"), (LocalDispatcher(), "batched")]
    for dispatcher, backend in cases:
        layer.dispatch, layer.experts.costs = dispatcher, {backend: Cost(0.0, 0.0)}
        layer.zero_grad()
        inputs = x.reshape(32, 6).clone().requires_grad_()
        y, _ = layer(inputs, tokens)
        y.square().sum().backward()
        results.append([y, inputs.grad, *(parameter.grad for parameter in layer.parameters())])
    for result in results[1:]:
        for tensor, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)


@given(seeds, numbers_of_tokens, st.sampled_from([1, 2, 5]), st.floats(0, 2))
def test_rows_and_back_is_an_identity_for_each_kept_choice(seed: int, tokens: int, experts: int, factor: float) -> None:
    routing = routing_of(seed, tokens, experts, capacity_factor=factor, min_capacity=1)
    x = random_rows(tokens, 3)
    rows = tokens_to_rows(x, routing.assignments)
    assert torch.equal(rows, x[routing.assignments.token])
    back = rows_to_tokens(rows, routing.assignments)
    torch.testing.assert_close(back, x * routing.kept.sum(-1, keepdim=True))
    combine, _ = combine_weights(routing.assignments, tokens)
    torch.testing.assert_close(combine.sum((2, 3)).view(-1), routing.weight.sum(-1))


def test_padding_rows_have_no_weight() -> None:
    routing = routing_of(0, 9, 3)
    counts, assignments = routing.load.tolist(), routing.assignments
    assert pad_assignments(assignments, counts, counts) is assignments
    padded_assignments, real = (
        pad_assignments(assignments, counts, [7, 7, 7]),
        padded_slots(counts, [7, 7, 7], torch.device("cpu")),
    )
    assert [row // 7 for row in real.tolist()] == assignments.expert.tolist()
    assert torch.equal(padded_assignments.weight[real], assignments.weight)
    assert (padded_assignments.weight != 0).sum() == len(real)
    assert sorted([*real.tolist(), *padded_assignments.padding_rows.tolist()]) == list(range(21)), (
        "every row is one or the other"
    )
    rows = random_rows(21, 3)
    torch.testing.assert_close(rows_to_tokens(rows, padded_assignments), rows_to_tokens(rows[real], assignments))


@pytest.mark.parametrize("huge", [1e200, torch.inf, torch.nan])
@pytest.mark.parametrize("activation", ["relu", "swiglu", "swiglu_clamped"])
def test_a_token_that_no_expert_takes_is_never_multiplied(activation: str, huge: float) -> None:
    """Padding may have any values and gradients, also in the first token: padding rows are not copies of it."""
    torch.manual_seed(0)
    layer = layer_of(activation=activation, router="switch_top1")
    layer.experts.costs = {"batched": Cost(0.0, 0.0)}
    padding = torch.arange(12) == 0
    choices = route(random_rows(1, 12, 4), layer.spec, TokenContext(padding=padding)).choices
    counts = choices.load.tolist()
    assert layer.experts.local_computation(counts).counts != counts
    x, upstream = random_rows(2, 12, 6)

    def results(first: float) -> tuple[torch.Tensor, ...]:
        inputs = x.masked_fill(padding[:, None], first).requires_grad_()
        rows, weight, computation, combiner = LocalDispatcher()(inputs, choices, layer.experts)
        y = combiner.combine(layer.experts(rows, weight, computation))
        leaves = (inputs, *layer.experts.parameters())
        return y, *torch.autograd.grad(y, leaves, upstream.masked_fill(padding[:, None], first))

    for tensor, expected in zip(results(huge), results(0.0), strict=True):
        assert torch.equal(tensor, expected)


def test_rows_from_other_ranks_are_padded_with_zeros() -> None:
    """They are not copies of an arriving row, which might overflow in another expert."""
    arriving = torch.tensor([[1, 0, 2], [1, 1, 0]])
    work = LocalComputation([4, 4, 4], ACTIVATIONS["relu"], BACKENDS["batched"])
    order = SortedChunk.from_arriving(lambda counts: work, arriving, torch.device("cpu"))
    rows, expected = torch.arange(1.0, 6.0)[:, None].expand(5, 3), torch.zeros(12)
    expected[[0, 1, 4, 8, 9]] = torch.tensor([1.0, 4.0, 5.0, 2.0, 3.0])
    assert torch.equal(order.to_expert_order(rows), expected[:, None].expand(12, 3))
    assert torch.equal(order.to_rank_order(order.to_expert_order(rows)), rows)


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4))
def test_rows_from_many_ranks_are_sorted_by_expert_and_back(counts: list[list[int]]) -> None:
    labels = [(e, r, i) for r, row in enumerate(counts) for e, count in enumerate(row) for i in range(count)]
    by_expert, by_rank = expert_and_rank_order(torch.tensor(counts))
    assert [labels[i] for i in by_expert.tolist()] == sorted(labels)
    assert torch.equal(by_expert[by_rank], torch.arange(len(labels)))


@given(
    st.integers(0, 5), st.integers(1, 7),
    st.sampled_from([(torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2]),
)  # fmt: skip
def test_rows_and_their_weights_are_sent_together_bit_for_bit(
    num_rows: int, width: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    rows, weight = torch.randn(num_rows, width).to(dtypes[0]), torch.randn(num_rows).to(dtypes[1])
    buffer = _pack(rows, weight)
    assert buffer.dtype == rows.dtype
    unpacked_rows, unpacked_weight = _unpack(buffer, weight.dtype)
    assert torch.equal(unpacked_rows, rows)
    assert torch.equal(unpacked_weight, weight)


@given(seeds, numbers_of_tokens, st.sampled_from([{}, {"router": "expert_choice"}]), st.data())
def test_rows_of_some_tokens_are_theirs_in_order(
    seed: int, tokens: int, fields: dict[str, Any], data: st.DataObject
) -> None:
    routing = routing_of(seed, tokens, **fields)
    numbers = torch.tensor(
        sorted(data.draw(st.sets(st.integers(0, max(0, tokens - 1)), max_size=tokens))), dtype=torch.int64
    )
    selection, assignments = routing.choices.select_tokens(numbers), routing.assignments
    part = selection.to_rows(selection.device_counts.tolist())
    is_selected = torch.isin(assignments.token, numbers)
    assert torch.equal(numbers[part.token], assignments.token[is_selected])
    assert torch.equal(part.expert, assignments.expert[is_selected])
    assert part.counts == part.load.tolist() == torch.bincount(assignments.expert[is_selected], minlength=8).tolist()
    rows = random_rows(assignments.token.numel(), 3)
    torch.testing.assert_close(rows_to_tokens(rows[is_selected], part), rows_to_tokens(rows, assignments)[numbers])
    assert torch.equal(selection.reaches(2), routing.choices.reaches(2)[:, numbers])


@given(st.lists(st.lists(st.integers(0, 20), min_size=4, max_size=4), min_size=1, max_size=3), st.integers(1, 60))
def test_chunks_hold_every_row_once_and_no_more_than_the_bound(counts: list[list[int]], limit: int) -> None:
    arriving = torch.tensor(counts)
    num_chunks = min_chunks(arriving, limit)
    chunks = _chunks(arriving, arriving, num_chunks)
    assert torch.equal(sum(chunk.arriving for chunk in chunks), arriving)
    assert chunks[-1].send_slice.stop == int(arriving.sum())
    max_rows = max(limit, int((arriving > 0).sum()))
    assert all(int(chunk.arriving.sum()) <= max_rows for chunk in chunks)
    if num_chunks > 1:
        assert int((-(-arriving // (num_chunks - 1))).sum()) > max_rows, "fewer would not be sure to suffice"
    of_two = torch.stack((arriving, arriving // 2))
    assert min_chunks(of_two, limit) == max(min_chunks(rank_counts, limit) for rank_counts in of_two)


@given(seeds, numbers_of_tokens, st.sampled_from([1, 2, 5]), st.sampled_from([1, 2]))
def test_rows_in_chunks_are_ordered_by_chunk_rank_and_expert(
    seed: int, tokens: int, num_chunks: int, parts: int
) -> None:
    assignments = routing_of(seed, tokens).assignments
    by_chunk = _order_by_chunk(assignments, num_chunks, 2, parts)  # two experts a rank
    leaving = assignments.load.view(4, 2).repeat_interleave(parts, 0)
    row = 0
    for chunk in _chunks(leaving, leaving, num_chunks):
        for rank, counts in enumerate(chunk.arriving.tolist()):  # each rank receives what the other sends
            for local, count in enumerate(counts):
                assert (by_chunk.expert[row : row + count] == rank // parts * 2 + local).all()
                row += count
    assert row == by_chunk.token.numel() == parts * assignments.token.numel()
    x = random_rows(tokens, 3)
    once, in_chunks = (
        rows_to_tokens(tokens_to_rows(x, rows) * rows.weight[:, None], rows) for rows in (assignments, by_chunk)
    )
    torch.testing.assert_close(in_chunks, parts * once)


@given(seeds, numbers_of_tokens, st.sampled_from([1, 2, 4, 8]))
def test_a_token_crosses_once_to_a_node_with_several_of_its_experts(seed: int, tokens: int, nodes: int) -> None:
    routing = routing_of(seed, tokens)
    crosses, assignments = routing.choices.reaches(nodes), routing.assignments
    crossing, row_of_choice = deduplicate_by_node(assignments, crosses, crosses.sum(1), crosses.sum(1).tolist())
    node = assignments.expert // (8 // nodes)
    expected = sorted(set(zip(node.tolist(), assignments.token.tolist(), strict=True)))
    assert list(zip(crossing.expert.tolist(), crossing.token.tolist(), strict=True)) == expected
    assert torch.equal(crossing.token[row_of_choice], assignments.token)
    assert torch.equal(crossing.expert[row_of_choice], node)
    x = random_rows(tokens, 3)
    times = torch.bincount(crossing.token, minlength=tokens)[:, None]
    torch.testing.assert_close(rows_to_tokens(tokens_to_rows(x, crossing), crossing), x * times)
