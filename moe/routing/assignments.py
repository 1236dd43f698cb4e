"""Kept choices as rows, the input of dispatchers."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Assignments:
    """Kept choices as rows, sorted by expert, then group, then position in the expert's buffer for that group.

    `token`, `expert` and `position` int64 `[n]`; `weight` `[n]`, at least float32.
    """

    token: Tensor
    expert: Tensor
    weight: Tensor
    position: Tensor
    rows_by_token: Tensor
    """int64 `[n]`: row indices sorted by token, then by preference, or by expert under expert choice."""
    first_by_token: Tensor
    """int64 `[T]`: offset of each token's first row in `rows_by_token`."""
    load: Tensor
    """int64 `[E]`: rows per expert."""
    counts: list[int]
    """`load` on the host."""
    filling: Tensor | None = None
    """int64: indices of padding rows, which belong to no choice; None if there are none."""

    @classmethod
    def in_order(
        cls,
        token: Tensor,
        expert: Tensor,
        weight: Tensor,
        position: Tensor,
        num_tokens: int,
        load: Tensor,
        counts: list[int],
    ) -> "Assignments":
        """Build from rows `[n]` sorted by expert; the rows of a token keep that order."""
        per_token = counted(token, num_tokens)
        return cls(
            token=token,
            expert=expert,
            weight=weight,
            position=position,
            rows_by_token=token.argsort(stable=True),
            first_by_token=per_token.cumsum(0) - per_token,
            load=load,
            counts=counts,
        )

    def of_tokens(self, first: int, stop: int, load: Tensor, counts: list[int], before: int) -> "Assignments":
        """Rows of the tokens `first` to `stop`, renumbered from 0. `load` and `counts` are their rows per expert;
        `before` is the number of rows of earlier tokens."""
        in_range = (self.token >= first) & (self.token < stop)
        num_rows = sum(counts)
        rows = positions(in_range, num_rows)
        place = torch.empty_like(self.token).index_copy_(0, rows, torch.arange(num_rows, device=rows.device))
        return Assignments(
            token=self.token[rows] - first,
            expert=self.expert[rows],
            weight=self.weight[rows],
            position=self.position[rows],
            rows_by_token=place[self.rows_by_token[before : before + num_rows]],
            first_by_token=self.first_by_token[first:stop] - before,
            load=load,
            counts=counts,
        )


def counted(values: Tensor, num_values: int) -> Tensor:
    """int64 `[num_values]`: occurrences of 0, 1, ... in `values`, without the GPU synchronization of
    `torch.bincount`."""
    increments = values.new_ones(()).expand_as(values)
    return values.new_zeros(num_values).index_add_(0, values, increments)


def positions(chosen: Tensor, number: int) -> Tensor:
    """int64 `[number]`: indices of the `number` True entries of `chosen` bool `[n]`, without the GPU synchronization of
    `nonzero`."""
    place = torch.where(chosen, chosen.cumsum(0) - 1, number)
    indices = torch.arange(chosen.numel(), device=chosen.device)
    return place.new_empty(number + 1).scatter_(0, place, indices)[:number]
