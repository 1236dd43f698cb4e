"""Expert choices after capacity, and their rows once the host knows how many there are."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from moe.routing.assignments import Assignments, counted, positions
from moe.routing.capacity import Queues


class Pairs(NamedTuple):
    """Token and expert of each choice, int64 `[n]`, in no order; choices with `kept` bool `[n]` False do not count."""

    token: Tensor
    expert: Tensor
    kept: Tensor


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

    def of_tokens(self, first: int, stop: int) -> "Choices":
        """Choices of the tokens `first` to `stop`, renumbered from 0."""
        return self if (first, stop) == (0, self.num_tokens) else _ChoicesOfSome(self, first, stop)

    def reaches(self, num_parts: int) -> Tensor:
        """bool `[num_parts, T]`: whether a token has kept choices in each of `num_parts` equal, contiguous ranges of
        experts."""
        token, expert, is_kept = self.pairs
        part = expert // (self.load.numel() // num_parts)
        number = token.new_zeros(num_parts * self.num_tokens)
        number.index_add_(0, part * self.num_tokens + token, is_kept.to(number.dtype))
        return (number > 0).view(num_parts, self.num_tokens)


@dataclass(frozen=True)
class ChoicesOfTokens(Choices):
    """K choices of each token, in token order."""

    expert: Tensor
    """int64 `[T, K]`, by preference."""
    weight: Tensor
    """`[T, K]`"""
    kept: Tensor
    """bool `[T, K]`"""
    position: Tensor
    """int64 `[T, K]`: position in the expert's buffer, as rows carry it."""
    slots: Queues
    """Queues of the kept choices, without gaps."""

    @property
    def num_tokens(self) -> int:
        return self.expert.shape[0]

    @property
    def pairs(self) -> Pairs:
        token = torch.arange(self.num_tokens, device=self.expert.device)[:, None].expand_as(self.expert)
        return Pairs(token.reshape(-1), self.expert.reshape(-1), self.kept.reshape(-1))

    @cached_property
    def load(self) -> Tensor:
        return self.slots.length.sum(0)

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
            rows_by_token=row.reshape(-1)[positions(self.kept.reshape(-1), num_rows)],
            first_by_token=_starts(self.kept.sum(1)),
            load=self.load,
            counts=host_counts,
        )

    def detach(self) -> "ChoicesOfTokens":
        return replace(self, weight=self.weight.detach())


@dataclass(frozen=True)
class ChoicesInOrder(Choices):
    """K choices of each token, whose rows are sorted by expert, then token: no queues are needed."""

    expert: Tensor
    """int64 `[T, K]`"""
    weight: Tensor
    """`[T, K]`"""
    kept: Tensor
    """bool `[T, K]`"""
    num_experts: int
    known_load: Tensor | None = None
    """int64 `[E]`: rows per expert, if already counted."""

    @property
    def num_tokens(self) -> int:
        return self.expert.shape[0]

    @property
    def pairs(self) -> Pairs:
        token = torch.arange(self.num_tokens, device=self.expert.device)[:, None].expand_as(self.expert)
        return Pairs(token.reshape(-1), self.expert.reshape(-1), self.kept.reshape(-1))

    @cached_property
    def _queue(self) -> Tensor:
        """int64 `[T · K]`: expert of each choice; E where it is not kept."""
        return torch.where(self.kept, self.expert, self.num_experts).reshape(-1)

    @cached_property
    def load(self) -> Tensor:
        if self.known_load is not None:
            return self.known_load
        return counted(self._queue, self.num_experts + 1)[: self.num_experts]

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
            rows_by_token=row[positions(self.kept.reshape(-1), num_rows)],
            first_by_token=_starts(per_token),
            load=self.load,
            counts=host_counts,
        )

    def detach(self) -> "ChoicesInOrder":
        return replace(self, weight=self.weight.detach())

    def of_tokens(self, first: int, stop: int) -> "ChoicesInOrder":
        if (first, stop) == (0, self.num_tokens):
            return self
        token_slice = slice(first, stop)
        return ChoicesInOrder(
            self.expert[token_slice], self.weight[token_slice], self.kept[token_slice], self.num_experts
        )


@dataclass(frozen=True)
class ChoicesOfExperts(Choices):
    """C choices of each expert in each group."""

    token: Tensor
    """int64 `[E, G, C]`"""
    weight: Tensor
    """`[E, G, C]`"""
    kept: Tensor
    """bool `[E, G, C]`"""
    of_tokens_in_all: int

    @property
    def num_tokens(self) -> int:
        return self.of_tokens_in_all

    @property
    def pairs(self) -> Pairs:
        num_experts = self.token.shape[0]
        expert = torch.arange(num_experts, device=self.token.device)[:, None, None].expand_as(self.token)
        return Pairs(self.token.reshape(-1), expert.reshape(-1), self.kept.reshape(-1))

    @cached_property
    def load(self) -> Tensor:
        return self.kept.sum((1, 2))

    def to_rows(self, host_counts: list[int]) -> Assignments:
        buffer = positions(self.kept.reshape(-1), sum(host_counts))
        owner = self.token.reshape(-1)[buffer]
        return Assignments(
            token=owner,
            expert=buffer // max(1, self.kept[0].numel()),
            weight=self.weight.reshape(-1)[buffer],
            position=buffer % max(1, self.token.shape[-1]),
            rows_by_token=owner.argsort(stable=True),
            first_by_token=_starts(counted(owner, self.num_tokens)),
            load=self.load,
            counts=host_counts,
        )

    def detach(self) -> "ChoicesOfExperts":
        return replace(self, weight=self.weight.detach())


@dataclass(frozen=True)
class _ChoicesOfSome(Choices):
    whole: Choices
    first: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.first

    @property
    def pairs(self) -> Pairs:
        token, expert, is_kept = self.whole.pairs
        in_range = is_kept & (token >= self.first) & (token < self.stop)
        return Pairs(torch.where(in_range, token - self.first, 0), expert, in_range)

    @cached_property
    def load(self) -> Tensor:
        _, expert, is_kept = self.pairs
        load = self.whole.load.new_zeros(self.whole.load.shape)
        return load.index_add_(0, expert, is_kept.to(load.dtype))

    @property
    def device_counts(self) -> Tensor:
        token, _, is_kept = self.whole.pairs
        before = (is_kept & (token < self.first)).sum()
        return torch.cat((self.whole.device_counts, self.load, before[None]))

    def to_rows(self, host_counts: list[int]) -> Assignments:
        *of_whole, before = host_counts
        num_experts = self.load.numel()
        whole, counts = of_whole[:-num_experts], of_whole[-num_experts:]
        return self.whole.to_rows(whole).of_tokens(self.first, self.stop, self.load, counts, before)

    def detach(self) -> "_ChoicesOfSome":
        return replace(self, whole=self.whole.detach())


def _starts(counts: Tensor) -> Tensor:
    """Offsets of consecutive runs of the lengths `counts`."""
    return counts.cumsum(0) - counts
