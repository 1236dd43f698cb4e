"""Rows out of tokens and tokens out of rows, both by gathering, so that neither pass adds in a race."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moe.experts.products import places
from moe.routing import Assignments


class _TokensToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, rows_by_token: Tensor, first_by_token: Tensor) -> Tensor:
        ctx.save_for_backward(rows_by_token, first_by_token)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _sums_by_token(gradients[0], *ctx.saved_tensors), None, None, None


class _RowsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, token: Tensor, rows_by_token: Tensor, first_by_token: Tensor
    ) -> Tensor:
        ctx.save_for_backward(token)
        return _sums_by_token(rows, rows_by_token, first_by_token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (token,) = ctx.saved_tensors
        return gradients[0].index_select(0, token), None, None, None


def _sums_by_token(rows: Tensor, rows_by_token: Tensor, first_by_token: Tensor) -> Tensor:
    """`[T, M]`: each token's rows added in their order; zero for a token without any."""
    if not rows.numel():
        return rows.new_zeros(first_by_token.shape[0], rows.shape[1])
    return functional.embedding_bag(rows_by_token, rows.contiguous(), first_by_token, mode="sum")


def pad(assignments: Assignments, counts: list[int], padded: list[int]) -> Assignments:
    """The same with `padded[e]` rows for expert e in place of `counts[e]`, as far as rows and weights go: `expert` and
    `position` stay those of the kept choices.

    The rows that fill up are those of token 0 and weigh nothing: neither outputs nor gradients know of them.
    """
    if padded == counts:
        return assignments
    place = places(counts, padded, assignments.token.device)
    fill_up = assignments.token.new_zeros(sum(padded))
    return replace(
        assignments,
        token=fill_up.index_copy(0, place, assignments.token),
        weight=assignments.weight.new_zeros(sum(padded)).index_copy(0, place, assignments.weight),
        rows_by_token=place[assignments.rows_by_token],
    )


def tokens_to_rows(x: Tensor, assignments: Assignments) -> Tensor:
    """`[n, M]`, a row for each kept choice in the order of `assignments`, from tokens `x` `[T, M]`."""
    return _TokensToRows.apply(x, assignments.token, assignments.rows_by_token, assignments.first_by_token)


def rows_to_tokens(rows: Tensor, assignments: Assignments) -> Tensor:
    """`[T, M]`, the sum of each token's rows, from `rows` `[n, M]` in the order of `assignments`."""
    return _RowsToTokens.apply(rows, assignments.token, assignments.rows_by_token, assignments.first_by_token)
