"""Gathers of tokens to rows and of rows to tokens. Both passes gather, without atomic additions, so results are
deterministic."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moe.experts.products import padding_slots, slots
from moe.routing import Assignments


class _TokensToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, assignments: Assignments) -> Tensor:
        ctx.save_for_backward(assignments.rows_by_token, assignments.first_by_token)
        return _rows_of_tokens(x, assignments.token, assignments.filling)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sums_by_token(gradients[0], *ctx.saved_tensors), None


class _RowsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, assignments: Assignments) -> Tensor:
        ctx.save_for_backward(assignments.token, assignments.filling)
        return _sums_by_token(rows, assignments.rows_by_token, assignments.first_by_token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _rows_of_tokens(gradients[0], *ctx.saved_tensors), None


def _rows_of_tokens(x: Tensor, token: Tensor, filling: Tensor | None) -> Tensor:
    """`[n, M]`: each row's token. Padding rows are set to zero: scaling by zero would keep NaN and inf."""
    rows = x.index_select(0, token)
    return rows if filling is None else rows.index_fill_(0, filling, 0)


def _sums_by_token(rows: Tensor, rows_by_token: Tensor, first_by_token: Tensor) -> Tensor:
    """`[T, M]`: sum of each token's rows in order; zero for a token without rows."""
    if not rows.numel():
        return rows.new_zeros(first_by_token.shape[0], rows.shape[1])
    return functional.embedding_bag(rows_by_token, rows.contiguous(), first_by_token, mode="sum")


def pad(assignments: Assignments, counts: list[int], padded: list[int]) -> Assignments:
    """Pad each expert's rows from `counts[e]` to `padded[e]` with zeros of weight zero, which affect neither outputs
    nor gradients. `expert` and `position` still list only the kept choices."""
    if padded == counts:
        return assignments
    slot = slots(counts, padded, assignments.token.device)
    fill_up = assignments.token.new_zeros(sum(padded))
    return replace(
        assignments,
        token=fill_up.index_copy(0, slot, assignments.token),
        weight=assignments.weight.new_zeros(sum(padded)).index_copy(0, slot, assignments.weight),
        rows_by_token=slot[assignments.rows_by_token],
        filling=padding_slots(counts, padded, assignments.token.device),
    )


def tokens_to_rows(x: Tensor, assignments: Assignments) -> Tensor:
    """Gather tokens `x` `[T, M]` into rows `[n, M]`, one per kept choice, in the order of `assignments`."""
    return _TokensToRows.apply(x, assignments)


def rows_to_tokens(rows: Tensor, assignments: Assignments) -> Tensor:
    """Sum rows `[n, M]`, in the order of `assignments`, into tokens `[T, M]`."""
    return _RowsToTokens.apply(rows, assignments)
