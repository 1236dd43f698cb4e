"""Rows out of tokens and tokens out of rows, both by gathering, so that neither pass adds in a race.

A kept choice is one row. `token` `[n]` says whose row it is; `row_of_choice` `[T, K]` says where each of a
token's choices went (n where it was not kept).
"""

from typing import Any

import torch
from torch import Tensor

from moe.routing import Assignments


class _TokensToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, row_of_choice: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_choice)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (row_of_choice,) = ctx.saved_tensors
        return _sum_of_rows(gradients[0], row_of_choice), None, None


class _RowsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, token: Tensor, row_of_choice: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, token)
        return _sum_of_rows(rows * weight[:, None].to(rows.dtype), row_of_choice)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weight, token = ctx.saved_tensors
        d_tokens = gradients[0].index_select(0, token)
        d_weight = (d_tokens * rows).sum(-1, dtype=weight.dtype)
        return d_tokens * weight[:, None].to(rows.dtype), d_weight, None, None


def _sum_of_rows(rows: Tensor, row_of_choice: Tensor) -> Tensor:
    """`[T, M]`: each token's rows added in order of preference; a choice that was not kept adds zero."""
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    total = padded.index_select(0, row_of_choice[:, 0])
    for preference in range(1, row_of_choice.shape[1]):
        total += padded.index_select(0, row_of_choice[:, preference])
    return total


def tokens_to_rows(x: Tensor, assignments: Assignments) -> Tensor:
    """`[n, M]`, a row for each kept choice in the order of `assignments`, from tokens `x` `[T, M]`."""
    return _TokensToRows.apply(x, assignments.token, assignments.row_of_choice)


def rows_to_tokens(rows: Tensor, assignments: Assignments) -> Tensor:
    """`[T, M]`, the weighted sum of each token's rows, from `rows` `[n, M]` in the order of `assignments`."""
    return _RowsToTokens.apply(rows, assignments.weight, assignments.token, assignments.row_of_choice)
