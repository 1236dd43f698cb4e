"""Rows of the kept choices, sorted by expert, and the queues that admit them."""

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
    padding_rows: Tensor | None = None
    """int64: indices of padding rows, which belong to no choice; None if there are none."""

    @classmethod
    def from_sorted_rows(
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
        per_token = bincount(token, num_tokens)
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

    def select_tokens(self, place: Tensor, num_tokens: int, load: Tensor, counts: list[int]) -> "Assignments":
        """Rows of `num_tokens` tokens, renumbered by `place` int64 `[T]`, which rises with the token and is -1 for all
        others. `load` and `counts` are their rows per expert."""
        num_rows = sum(counts)
        rows = true_indices(place[self.token] >= 0, num_rows)
        row_place = torch.empty_like(self.token).index_copy_(0, rows, torch.arange(num_rows, device=rows.device))
        rows_by_token = self.rows_by_token[true_indices(place[self.token[self.rows_by_token]] >= 0, num_rows)]
        token = place[self.token[rows]]
        return Assignments(
            token=token,
            expert=self.expert[rows],
            weight=self.weight[rows],
            position=self.position[rows],
            rows_by_token=row_place[rows_by_token],
            first_by_token=first_indices(bincount(token, num_tokens)),
            load=load,
            counts=counts,
        )


def bincount(values: Tensor, num_values: int) -> Tensor:
    """int64 `[num_values]`: occurrences of 0, 1, ... in `values`, without the GPU synchronization of
    `torch.bincount`."""
    increments = values.new_ones(()).expand_as(values)
    return values.new_zeros(num_values).index_add_(0, values, increments)


def true_indices(mask: Tensor, num_true: int) -> Tensor:
    """int64 `[num_true]`: indices of the `num_true` True entries of `mask` bool `[n]`, without the GPU synchronization
    of `nonzero`."""
    place = torch.where(mask, mask.cumsum(0) - 1, num_true)
    indices = torch.arange(mask.numel(), device=mask.device)
    return place.new_empty(num_true + 1).scatter_(0, place, indices)[:num_true]


@dataclass(frozen=True)
class Queues:
    """Requests for each expert of a group, in the order of admission."""

    position: Tensor
    """int64 `[G, S, K]`: requests ahead of this one; undefined for choices that do not ask."""
    length: Tensor
    """int64 `[G, E]`: number of requests."""

    def admits(self, capacity: int | None) -> Tensor:
        """bool `[G, S, K]`: whether a request is within `capacity`; all are if it is None."""
        if capacity is None:
            return torch.ones_like(self.position, dtype=torch.bool)
        return self.position < capacity

    def within_capacity(self, capacity: int | None) -> "Queues":
        """The requests within `capacity`."""
        return self if capacity is None else Queues(self.position, self.length.clamp(max=capacity))


def queue_choices(expert: Tensor, asks: Tensor, num_experts: int, priority: Tensor | None = None) -> Queues:
    """Queue choices for their experts in each group: first choices before second ones, then in token order; with
    `priority`, the highest first.

    `expert` int64, `asks` bool (which choices count) and `priority` are `[G, S, K]`.
    """
    num_groups, group_tokens, per_token = expert.shape
    queue = torch.where(asks, expert, num_experts)  # choices that do not ask get a queue of their own
    queue += torch.arange(num_groups, device=expert.device)[:, None, None] * (num_experts + 1)
    flat = queue.transpose(1, 2).reshape(-1)  # [G, K, S]
    if priority is None:
        order = flat.argsort(stable=True)
    else:
        highest_first = priority.detach().transpose(1, 2).reshape(-1).argsort(descending=True, stable=True)
        order = highest_first[flat[highest_first].argsort(stable=True)]
    length = bincount(flat, num_groups * (num_experts + 1))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)
    position = rank - (length.cumsum(0) - length)[flat]
    return Queues(
        position.view(num_groups, per_token, group_tokens).transpose(1, 2),
        length.view(num_groups, num_experts + 1)[:, :num_experts],
    )


def first_indices(counts: Tensor) -> Tensor:
    """Offsets of consecutive runs of the lengths `counts`."""
    return counts.cumsum(0) - counts
