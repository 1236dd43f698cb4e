"""What plans say that context ranks exchange, beside what ranks receive."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe.layers import head_exchange, ring_attention
from moe.layers.attention_mask import AttentionMask
from moe.layers.context_attention import attend_over_context
from moe.parallel import ContextShard, context
from moe.plan.cost.context_exchange import received_elements
from moe.spec.language import GroupedQueryAttentionSpec
from moe.spec.parallel import ContextExchange
from tests.parity.gloo_ranks import Pools

LENGTH, ROWS, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 64, 2, 8, 2, 6, 4


class Counts:
    """Elements that this rank has received from others."""

    def __init__(self) -> None:
        self.received = 0

    def take(self) -> int:
        received, self.received = self.received, 0
        return received


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what the exchanges receive meanwhile."""
    counts, num_ranks = Counts(), dist.get_world_size()
    start, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single
    gather, scatter = context.all_gather_single, context.reduce_scatter_single

    def count_transfers(operations: list[dist.P2POp]) -> Any:
        counts.received += sum(entry.tensor.numel() for entry in operations if entry.op is dist.irecv)
        return start(operations)

    def counting(function: Any) -> Any:
        def call(output: Tensor, tensor: Tensor, **options: Any) -> Any:
            counts.received += max(output.numel(), tensor.numel()) * (num_ranks - 1) // num_ranks
            return function(output, tensor, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_attention.dist, "batch_isend_irecv", count_transfers)
        patch.setattr(head_exchange.dist, "all_to_all_single", counting(all_to_all))
        patch.setattr(context, "all_gather_single", counting(gather))
        patch.setattr(context, "reduce_scatter_single", counting(scatter))
        yield counts


def measured_elements(exchange: ContextExchange, mask: AttentionMask) -> tuple[int, int]:
    """Elements that this rank receives in a forward and in a backward pass."""
    group = dist.group.WORLD
    assert group is not None
    shard = ContextShard(LENGTH, group, exchange=exchange)
    shapes = ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, VALUE_WIDTH))
    inputs = [torch.randn(ROWS, heads, shard.num_local, width, requires_grad=True) for heads, width in shapes]
    with counted() as counts:
        outputs = attend_over_context(*inputs, context=shard, scale=1.0, attention_mask=mask)
        forward = counts.take()
        outputs.sum().backward()
        return forward, counts.take()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("exchange", get_args(ContextExchange))
@pytest.mark.parametrize("window", [None, 8, 20])
def test_plans_predict_what_ranks_receive(
    ranks: Pools, num_ranks: int, exchange: ContextExchange, window: int | None
) -> None:
    received = ranks[num_ranks].run(measured_elements, exchange, AttentionMask(window=window))
    spec = GroupedQueryAttentionSpec(
        kind="grouped_query", num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=WIDTH, value_dim=VALUE_WIDTH,
        window=window,
    )  # fmt: skip
    positions = ROWS * LENGTH / num_ranks
    predicted = received_elements(spec.dims(4, window), exchange, positions, num_ranks, 1, LENGTH)
    mean_forward, mean_backward = (sum(elements) / num_ranks for elements in zip(*received, strict=True))
    assert (mean_forward, mean_backward) == pytest.approx(predicted)
