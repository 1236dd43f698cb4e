"""Result of routing: each token's experts and weights within their capacity, and the rows of the kept choices."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

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
            first_by_token=_starts(bincount(token, num_tokens)),
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


class Pairs(NamedTuple):
    """Token and expert of each choice, int64 `[n]`, in no order; choices with `kept` bool `[n]` False do not count."""

    token: Tensor
    expert: Tensor
    kept: Tensor


class ChoicesOfTokens(NamedTuple):
    """K choices of each token: `expert` int64, `weight` and `kept` bool, each `[T, K]`."""

    expert: Tensor
    weight: Tensor
    kept: Tensor


class DeviceRows(NamedTuple):
    """Rows of the kept choices, sorted by expert; only the device knows how many."""

    row: Tensor
    """int32 `[T, K]`: row of each choice; -1 where it is not kept."""
    choice: Tensor
    """int32 `[T · K]`: choice (t · K + k) of each row; undefined from row `first_row[E]` on."""
    first_row: Tensor
    """int32 `[E + 1]`: first row of each expert, then the number of rows."""


class Choices(ABC):
    """Experts of each token, as tensors on the device.

    `to_rows` needs counts on the host, which synchronizes a GPU: a dispatcher reads `device_counts` together with all
    other counts it needs.
    """

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """T, the number of tokens."""

    @property
    @abstractmethod
    def pairs(self) -> Pairs:
        """Token and expert of each choice, kept or not."""

    @property
    def by_token(self) -> ChoicesOfTokens | None:
        """The choices by token; None if experts chose."""
        return None

    @property
    def device_rows(self) -> DeviceRows | None:
        """Rows of the choices by token, if they are known."""
        return None

    @property
    @abstractmethod
    def load(self) -> Tensor:
        """int64 `[E]`: rows per expert."""

    @property
    def device_counts(self) -> Tensor:
        """int64 `[n]`: counts to copy to the host for `to_rows`."""
        return self.load

    @abstractmethod
    def to_rows(self, host_counts: list[int]) -> Assignments:
        """Rows of the kept choices. `host_counts` are the values of `device_counts`."""

    @abstractmethod
    def detach(self) -> "Choices":
        """The same choices, detached from the autograd graph."""

    @abstractmethod
    def scale_weights(self, factor_E: Tensor) -> "Choices":
        """The same choices, with weights multiplied by the factor of each expert."""

    def select_tokens(self, tokens: Tensor) -> "Choices":
        """Choices of some tokens int64 `[t]`, in rising order, renumbered from 0."""
        return self if len(tokens) == self.num_tokens else _SelectedChoices(self, tokens)

    def reaches(self, num_parts: int) -> Tensor:
        """bool `[num_parts, T]`: whether a token has kept choices in each of `num_parts` equal, contiguous ranges of
        experts."""
        token, expert, is_kept = self.pairs
        if self.num_tokens == 0:  # a selection still has the pairs of all tokens
            return is_kept.new_zeros(num_parts, 0)
        part = expert // (self.load.numel() // num_parts)
        number = token.new_zeros(num_parts * self.num_tokens)
        number.index_add_(0, part * self.num_tokens + token, is_kept.to(number.dtype))
        return (number > 0).view(num_parts, self.num_tokens)


@dataclass(frozen=True)
class _TokenChoices(Choices):
    expert: Tensor
    """int64 `[T, K]`, by preference."""
    weight: Tensor
    """`[T, K]`"""
    kept: Tensor
    """bool `[T, K]`"""

    @property
    def num_tokens(self) -> int:
        return self.expert.shape[0]

    @property
    def by_token(self) -> ChoicesOfTokens:
        return ChoicesOfTokens(self.expert, self.weight, self.kept)

    @property
    def pairs(self) -> Pairs:
        token = torch.arange(self.num_tokens, device=self.expert.device)[:, None].expand_as(self.expert)
        return Pairs(token.reshape(-1), self.expert.reshape(-1), self.kept.reshape(-1))

    def detach(self) -> Self:
        return replace(self, weight=self.weight.detach())

    def scale_weights(self, factor_E: Tensor) -> Self:
        return replace(self, weight=self.weight * factor_E.to(self.weight.dtype)[self.expert])


@dataclass(frozen=True)
class ChoicesByToken(_TokenChoices):
    """K choices of each token, in token order."""

    position: Tensor
    """int64 `[T, K]`: position in the expert's buffer, as rows carry it."""
    slots: Queues
    """Queues of the kept choices, without gaps."""
    known_load: Tensor | None = None
    """int64 `[E]`: rows per expert, if already counted."""
    known_rows: DeviceRows | None = None

    @property
    def device_rows(self) -> DeviceRows | None:
        return self.known_rows

    @cached_property
    def load(self) -> Tensor:
        return self.slots.length.sum(0) if self.known_load is None else self.known_load

    def to_rows(self, host_counts: list[int]) -> Assignments:
        num_rows = sum(host_counts)
        kept_EG = self.slots.length.t()
        num_groups = kept_EG.shape[1]
        first_row_EG = _starts(kept_EG.reshape(-1)).view_as(kept_EG)
        group = torch.arange(num_groups, device=kept_EG.device)[:, None, None]
        row = first_row_EG[self.expert.view(*self.slots.position.shape), group] + self.slots.position
        row = torch.where(self.kept, row.reshape(self.kept.shape), num_rows)
        choice = torch.arange(row.numel(), device=row.device)
        choice_of_row = row.new_empty(num_rows + 1).scatter_(0, row.reshape(-1), choice)[:num_rows]
        return Assignments(
            token=choice_of_row // max(1, self.expert.shape[1]),
            expert=self.expert.reshape(-1)[choice_of_row],
            weight=self.weight.reshape(-1)[choice_of_row],
            position=self.position.reshape(-1)[choice_of_row],
            rows_by_token=row.reshape(-1)[true_indices(self.kept.reshape(-1), num_rows)],
            first_by_token=_starts(self.kept.sum(1)),
            load=self.load,
            counts=host_counts,
        )


@dataclass(frozen=True)
class UnqueuedChoices(_TokenChoices):
    """K choices of each token, without capacity. Their queues are computed only if rows or positions are needed."""

    num_groups: int
    known_load: Tensor
    """int64 `[E]`: rows per expert."""

    @property
    def load(self) -> Tensor:
        return self.known_load

    @cached_property
    def queued(self) -> ChoicesByToken:
        """The same choices with their positions."""
        num_tokens, per_token = self.expert.shape
        by_group = (self.num_groups, num_tokens // max(1, self.num_groups), per_token)
        queues = queue_choices(self.expert.view(by_group), self.kept.view(by_group), self.load.numel())
        position = torch.where(self.kept, queues.position.reshape(self.kept.shape), 0)
        return ChoicesByToken(self.expert, self.weight, self.kept, position, queues)

    def to_rows(self, host_counts: list[int]) -> Assignments:
        return self.queued.to_rows(host_counts)


@dataclass(frozen=True)
class SortedChoices(_TokenChoices):
    """K choices of each token, whose rows are sorted by expert, then token: no queues are needed."""

    num_experts: int
    known_load: Tensor | None = None
    """int64 `[E]`: rows per expert, if already counted."""

    @cached_property
    def _queue(self) -> Tensor:
        """int64 `[T · K]`: expert of each choice; E where it is not kept."""
        return torch.where(self.kept, self.expert, self.num_experts).reshape(-1)

    @cached_property
    def load(self) -> Tensor:
        if self.known_load is not None:
            return self.known_load
        return bincount(self._queue, self.num_experts + 1)[: self.num_experts]

    def to_rows(self, host_counts: list[int]) -> Assignments:
        num_rows, per_token = sum(host_counts), self.kept.sum(1)
        order = self._queue.argsort(stable=True)
        row = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        choice_of_row = order[:num_rows]
        return Assignments(
            token=choice_of_row // self.expert.shape[1],
            expert=self._queue[choice_of_row],
            weight=self.weight.reshape(-1)[choice_of_row],
            position=torch.zeros_like(choice_of_row),
            rows_by_token=row[true_indices(self.kept.reshape(-1), num_rows)],
            first_by_token=_starts(per_token),
            load=self.load,
            counts=host_counts,
        )

    def select_tokens(self, tokens: Tensor) -> "SortedChoices":
        if len(tokens) == self.num_tokens:
            return self
        return SortedChoices(self.expert[tokens], self.weight[tokens], self.kept[tokens], self.num_experts)


@dataclass(frozen=True)
class ChoicesByExpert(Choices):
    """C choices of each expert in each group."""

    token: Tensor
    """int64 `[E, G, C]`"""
    weight: Tensor
    """`[E, G, C]`"""
    kept: Tensor
    """bool `[E, G, C]`"""
    total_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.total_tokens

    @property
    def pairs(self) -> Pairs:
        num_experts = self.token.shape[0]
        expert = torch.arange(num_experts, device=self.token.device)[:, None, None].expand_as(self.token)
        return Pairs(self.token.reshape(-1), expert.reshape(-1), self.kept.reshape(-1))

    @cached_property
    def load(self) -> Tensor:
        return self.kept.sum((1, 2))

    def to_rows(self, host_counts: list[int]) -> Assignments:
        buffer = true_indices(self.kept.reshape(-1), sum(host_counts))
        owner = self.token.reshape(-1)[buffer]
        return Assignments(
            token=owner,
            expert=buffer // max(1, self.kept[0].numel()),
            weight=self.weight.reshape(-1)[buffer],
            position=buffer % max(1, self.token.shape[-1]),
            rows_by_token=owner.argsort(stable=True),
            first_by_token=_starts(bincount(owner, self.num_tokens)),
            load=self.load,
            counts=host_counts,
        )

    def detach(self) -> "ChoicesByExpert":
        return replace(self, weight=self.weight.detach())

    def scale_weights(self, factor_E: Tensor) -> "ChoicesByExpert":
        return replace(self, weight=self.weight * factor_E.to(self.weight.dtype)[:, None, None])


@dataclass(frozen=True)
class _SelectedChoices(Choices):
    choices: Choices
    tokens: Tensor
    """int64 `[t]`, in rising order."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @cached_property
    def _place(self) -> Tensor:
        """int64 `[T]`: number of each token among the selected ones, -1 for the others."""
        numbers = torch.arange(len(self.tokens), device=self.tokens.device)
        return self.tokens.new_full((self.choices.num_tokens,), -1).index_copy_(0, self.tokens, numbers)

    @property
    def by_token(self) -> ChoicesOfTokens | None:
        by_token = self.choices.by_token
        return None if by_token is None else ChoicesOfTokens(*(field[self.tokens] for field in by_token))

    @property
    def pairs(self) -> Pairs:
        token, expert, is_kept = self.choices.pairs
        place = self._place[token]
        return Pairs(place.clamp(min=0), expert, is_kept & (place >= 0))

    @cached_property
    def load(self) -> Tensor:
        _, expert, is_kept = self.pairs
        load = self.choices.load.new_zeros(self.choices.load.shape)
        return load.index_add_(0, expert, is_kept.to(load.dtype))

    @property
    def device_counts(self) -> Tensor:
        return torch.cat((self.choices.device_counts, self.load))

    def to_rows(self, host_counts: list[int]) -> Assignments:
        num_experts = self.load.numel()
        counts, selected_counts = host_counts[:-num_experts], host_counts[-num_experts:]
        assignments = self.choices.to_rows(counts)
        return assignments.select_tokens(self._place, self.num_tokens, self.load, selected_counts)

    def detach(self) -> "_SelectedChoices":
        return replace(self, choices=self.choices.detach())

    def scale_weights(self, factor_E: Tensor) -> "_SelectedChoices":
        return replace(self, choices=self.choices.scale_weights(factor_E))


def _starts(counts: Tensor) -> Tensor:
    """Offsets of consecutive runs of the lengths `counts`."""
    return counts.cumsum(0) - counts


@dataclass(frozen=True)
class Routing:
    """Choices for T = G·S tokens and E experts.

    `expert`, `weight`, `kept` and `position` list the choices by token under token choice; they are None under expert
    choice.
    """

    choices: Choices
    expert: Tensor | None
    """int64 `[T, K]`, by preference."""
    weight: Tensor | None
    """`[T, K]`, at least float32; 0 where not kept."""
    kept: Tensor | None
    """bool `[T, K]`."""
    known_position: Tensor | None
    """`position`, unless it is computed when it is read."""
    num_groups: int
    capacity: int | None
    """Rows that an expert accepts from one group; None disables dropping."""
    chosen: Tensor
    """int64 `[E]`: choices of each expert before capacity."""
    aux_loss: Tensor
    """Scalar without its coefficient: mean over the router's balancing units: groups, sequences or tokens."""
    aux_units: Tensor
    """Scalar: number of those units in this call."""
    z_loss: Tensor
    """Scalar without its coefficient: mean over real tokens of the squared logsumexp of the logits (ST-MoE, arXiv
    2202.08906, eq. 5)."""
    entropy: Tensor
    """Scalar, in nats: mean over real tokens of the entropy of the router probabilities."""
    rejected: Tensor
    """Fraction of the real tokens' choices rejected by the second-expert policy."""
    dropped: Tensor
    """Fraction of the real tokens' choices dropped because their expert was full."""
    num_choices: Tensor
    """int64 scalar: choices of real tokens, the denominator of both fractions."""
    num_tokens: Tensor
    """int64 scalar: real tokens."""
    weighted_loss: Tensor | None = None
    """Scalar: this call's share of both losses times their coefficients, where kernels computed it."""
    one: Tensor | None = None
    """Scalar 1 on the device, written with `weighted_loss`."""

    def detach(self) -> "Routing":
        """The same routing, detached from the autograd graph."""
        weight = None if self.weight is None else self.weight.detach()
        aux_loss, z_loss = self.aux_loss.detach(), self.z_loss.detach()
        return replace(
            self, choices=self.choices.detach(), weight=weight, aux_loss=aux_loss, z_loss=z_loss, weighted_loss=None
        )

    def scale_weights(self, factor_E: Tensor) -> "Routing":
        """The same routing, with weights multiplied by the factor of each expert."""
        choices = self.choices.scale_weights(factor_E)
        by_token = choices.by_token
        return replace(self, choices=choices, weight=None if by_token is None else by_token.weight)

    @cached_property
    def position(self) -> Tensor | None:
        """int64 `[T, K]`: position in the expert's buffer for the token's group; 0 where not kept."""
        return self.choices.queued.position if isinstance(self.choices, UnqueuedChoices) else self.known_position

    @property
    def load(self) -> Tensor:
        """int64 `[E]`: kept choices of each expert."""
        return self.choices.load

    @cached_property
    def assignments(self) -> Assignments:
        """Rows of the kept choices. Synchronizes the device to read their number."""
        return self.choices.to_rows(self.choices.device_counts.tolist())
