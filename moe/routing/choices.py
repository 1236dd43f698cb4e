"""Choices of experts for tokens, in the order of tokens or of experts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from moe.routing.assignments import Assignments, Queues, bincount, first_indices, queue_choices, true_indices


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
        first_row_EG = first_indices(kept_EG.reshape(-1)).view_as(kept_EG)
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
            first_by_token=first_indices(self.kept.sum(1)),
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
            first_by_token=first_indices(per_token),
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
            first_by_token=first_indices(bincount(owner, self.num_tokens)),
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
