"""Rows of kept choices, as dispatchers consume them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Assignments:
    """The kept choices, a row for each, ordered by expert, then group, then place in the expert's buffer: what
    dispatchers consume.

    Of n rows: `token`, `expert` and `position` (in the expert's buffer of the token's group) int64 `[n]`,
    `weight` `[n]` at least float32.
    """

    token: Tensor
    expert: Tensor
    weight: Tensor
    position: Tensor
    rows_by_token: Tensor
    """int64 `[n]`: the rows of the first token, then those of the second, and so on; a token's in order of preference
    where tokens choose, of expert where experts do."""
    first_by_token: Tensor
    """int64 `[T]`: where each token's rows begin in `rows_by_token`."""
    load: Tensor
    """int64 `[E]`: rows of each expert."""
    counts: list[int]
    """The same numbers, as the host knows them."""
    filling: Tensor | None = None
    """int64: the rows that are no choice and only fill up; none where left out."""

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
        """From rows `[n]` that are ordered by expert already; a token's follow that order."""
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
        """Those of the tokens `first` to `stop`, which become tokens 0 and on: of each expert `load`, on the host
        `counts`. The tokens before have so many rows."""
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
    """int64 `[num_values]`: how often each of 0 and on is among `values`. `torch.bincount` has a GPU waited for."""
    increments = values.new_ones(()).expand_as(values)
    return values.new_zeros(num_values).index_add_(0, values, increments)


def positions(chosen: Tensor, number: int) -> Tensor:
    """int64 `[number]`: where `chosen` bool `[n]` is True, as often as the host knows it to be: `nonzero` would ask."""
    place = torch.where(chosen, chosen.cumsum(0) - 1, number)
    indices = torch.arange(chosen.numel(), device=chosen.device)
    return place.new_empty(number + 1).scatter_(0, place, indices)[:number]
