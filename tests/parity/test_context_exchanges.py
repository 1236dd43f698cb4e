"""Attention over context ranks by each exchange, compared with the reference on whole rows: outputs and every
gradient, under every mask."""

from dataclasses import dataclass
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.layers import mask_blocks
from moe.layers.attention_mask import AttentionMask
from moe.layers.context_attention import attend_over_context
from moe.layers.softmax_attention import attend_reference
from moe.parallel.context import ContextShard
from moe.parallel.zigzag import ZigzagChunks
from moe.spec.parallel import ContextExchange
from tests.parity.gloo_ranks import Pools, Ranks
from tests.unit.layers.gradients import outputs_and_gradients

EXCHANGES: tuple[ContextExchange, ...] = get_args(ContextExchange)


@dataclass(frozen=True)
class Case:
    """Inputs of whole rows, and their mask."""

    inputs: tuple[Tensor, ...]
    """Queries `[B, n, L, d]`, keys `[B, m, L, d]`, values `[B, m, L, dv]`, and sinks `[n]` where there are any."""
    mask: AttentionMask
    tile: int
    """Positions of a block that needs a mask."""

    @property
    def num_positions(self) -> int:
        return self.inputs[0].shape[2]


def own_results(exchange: ContextExchange, case: Case) -> list[Tensor]:
    """This rank's outputs and gradients."""
    rank, chunks = dist.get_rank(), ZigzagChunks(case.num_positions, dist.get_world_size())
    own = torch.tensor([position for chunk in chunks.rank_chunks(rank) for position in chunk], dtype=torch.int64)
    tensors, sinks = case.inputs[:3], case.inputs[3:]

    def attend(queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
        group = dist.group.WORLD
        assert group is not None
        context = ContextShard(case.num_positions, group, exchange=exchange)
        outputs = attend_over_context(
            queries, keys, values, context=context, scale=0.5, attention_mask=case.mask, sinks=sinks
        )
        shape = (*outputs.shape[:2], case.num_positions, outputs.shape[3])
        return outputs.new_zeros(shape).index_copy(2, own, outputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_blocks, "TILE", case.tile)
        return outputs_and_gradients(attend, *(tensor.index_select(2, own) for tensor in tensors), *sinks)


def all_own_results(exchange: ContextExchange, batch: list[Case]) -> list[list[Tensor]]:
    """This rank's results of each case: a call to processes takes longer than a case."""
    return [own_results(exchange, case) for case in batch]


def joined_results(results: list[list[Tensor]], num_positions: int) -> list[Tensor]:
    """Outputs and gradients of whole rows, from those of all ranks."""
    chunks = ZigzagChunks(num_positions, len(results))
    order = [position for rank in range(len(results)) for chunk in chunks.rank_chunks(rank) for position in chunk]
    places = torch.tensor(order, dtype=torch.int64).argsort()
    outputs, *gradients = zip(*results, strict=True)
    return [sum(outputs), *(sum(parts) if parts[0].dim() == 1 else torch.cat(parts, dim=2).index_select(2, places)
                            for parts in gradients)]  # fmt: skip


@st.composite
def cases(draw: st.DrawFn, num_ranks: int) -> Case:
    rows, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    key_heads = draw(st.sampled_from((1, num_ranks // 2, num_ranks, 2 * num_ranks)))
    heads = key_heads * groups if key_heads >= num_ranks else num_ranks * groups
    length = draw(st.integers(1, 24))
    wide, short = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    documents = first = keys = window = chunk = None
    causal = draw(st.booleans())
    if causal:
        match draw(st.sampled_from(("all", "window", "chunk"))):
            case "window":
                window = draw(st.integers(1, length + 2))
            case "chunk":
                chunk = draw(st.integers(1, length + 2))
    match draw(st.sampled_from(("all", "documents", "first", "keys"))):
        case "documents":
            row = st.lists(st.integers(-1, 2), min_size=length, max_size=length)
            orders = row.map(sorted) if chunk is not None else st.one_of(row.map(sorted), row)
            documents = torch.tensor([draw(orders) for _ in range(rows)])
        case "first":
            first = torch.tensor([draw(st.integers(0, length)) for _ in range(rows)])
        case "keys" if not causal:
            row = st.lists(st.booleans(), min_size=length - 1, max_size=length - 1)
            keys = torch.tensor([[True, *draw(row)] for _ in range(rows)])
    torch.manual_seed(draw(st.integers(0, 999)))
    shapes = ((heads, length, wide), (key_heads, length, wide), (key_heads, length, short))
    inputs = [torch.randn(rows, *shape, dtype=torch.float64) for shape in shapes]
    if draw(st.booleans()):
        inputs.append(torch.randn(heads, dtype=torch.float64) * 3)
    mask = AttentionMask(causal, window, chunk, documents=documents, first=first, keys=keys)
    return Case(tuple(inputs), mask, draw(st.integers(1, 5)))


def assert_equal(case: Case, results: list[list[Tensor]]) -> None:
    """The ranks' results are those of the reference."""

    def reference(queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attend_reference(queries, keys, values, scale=0.5, attention_mask=case.mask, sinks=sinks)

    expected = outputs_and_gradients(reference, *case.inputs)
    torch.testing.assert_close(joined_results(results, case.num_positions), expected, rtol=1e-12, atol=1e-12)


def compare_with_reference(ranks: Ranks, exchange: ContextExchange, batch: list[Case]) -> None:
    for case, *results in zip(batch, *ranks.run(all_own_results, exchange, batch), strict=True):
        assert_equal(case, results)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("num_ranks", [2, 4])
@settings(max_examples=2)
@given(data=st.data())
def test_exchanges_equal_the_reference(
    ranks: Pools, exchange: ContextExchange, num_ranks: int, data: st.DataObject
) -> None:
    batch = data.draw(st.lists(cases(num_ranks), min_size=8, max_size=8))
    compare_with_reference(ranks[num_ranks], exchange, batch)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("num_ranks", [2, 4])
@settings(max_examples=40)
@given(data=st.data())
def test_more_exchanges_equal_the_reference(
    ranks: Pools, exchange: ContextExchange, num_ranks: int, data: st.DataObject
) -> None:
    batch = data.draw(st.lists(cases(num_ranks), min_size=8, max_size=8))
    compare_with_reference(ranks[num_ranks], exchange, batch)
