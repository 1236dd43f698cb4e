"""All-to-all of rows with a backward pass: what goes out comes back the way it went."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits, ctx.group = (sent, received), group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.splits
        return _exchange(gradients[0], received, sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows `[sum(received), ...]` from every rank of `group`, in rank order, for `rows` `[sum(sent), ...]`.

    `sent[r]` consecutive rows go to rank r; zeros are fine, on any side. Differentiable. All ranks of the
    group call it together.
    """
    return _Exchange.apply(rows, sent, received, group)


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """int64 `[ranks, n]`: row r of the result is the row that rank r meant for this one."""
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts.contiguous(), group=group)
    return arrived
