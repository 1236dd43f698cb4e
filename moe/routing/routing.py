"""The result of routing: which tokens go to which experts, with what weights."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional


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
    """The same numbers, as the host knows them: asked for once, since a GPU is waited for each time."""
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
        num_experts: int,
    ) -> "Assignments":
        """From rows `[n]` that are ordered by expert already; a token's follow that order."""
        per_token, load = counted(token, num_tokens), counted(expert, num_experts)
        return cls(
            token=token,
            expert=expert,
            weight=weight,
            position=position,
            rows_by_token=token.argsort(stable=True),
            first_by_token=per_token.cumsum(0) - per_token,
            load=load,
            counts=load.tolist(),
        )

    def of_tokens(self, first: int, stop: int) -> "Assignments":
        """Those of the tokens `first` to `stop`, which become tokens 0 and on."""
        if first == 0 and stop == self.first_by_token.shape[0]:
            return self
        here = (self.token >= first) & (self.token < stop)
        load = self.load.new_zeros(self.load.shape).index_add_(0, self.expert, here.to(self.load.dtype))
        starts = functional.pad(self.first_by_token, (0, 1), value=self.token.numel())
        *counts, begin = torch.cat((load, starts[first : first + 1])).tolist()
        num_rows = sum(counts)
        rows = positions(here, num_rows)
        place = torch.empty_like(self.token).index_copy_(0, rows, torch.arange(num_rows, device=rows.device))
        return Assignments(
            token=self.token[rows] - first,
            expert=self.expert[rows],
            weight=self.weight[rows],
            position=self.position[rows],
            rows_by_token=place[self.rows_by_token[begin : begin + num_rows]],
            first_by_token=self.first_by_token[first:stop] - begin,
            load=load,
            counts=counts,
        )


def counted(values: Tensor, num_values: int) -> Tensor:
    """int64 `[num_values]`: how often each of 0 and on is among `values`. `torch.bincount` has a GPU waited for."""
    ones = values.new_ones(()).expand_as(values)
    return values.new_zeros(num_values).index_add_(0, values, ones)


def positions(chosen: Tensor, number: int) -> Tensor:
    """int64 `[number]`: where `chosen` bool `[n]` is True, as often as the host knows it to be: `nonzero` would ask."""
    place = torch.where(chosen, chosen.cumsum(0) - 1, number)
    every = torch.arange(chosen.numel(), device=chosen.device)
    return place.new_empty(number + 1).scatter_(0, place, every)[:number]


@dataclass(frozen=True)
class Routing:
    """Assignments of T = G·S tokens to E experts.

    `expert`, `weight`, `kept` and `position` show them by token in order, where tokens choose K experts each; where
    experts choose tokens, they are None.
    """

    assignments: Assignments
    expert: Tensor | None
    """int64 `[T, K]`, by preference."""
    weight: Tensor | None
    """`[T, K]`, at least float32; 0 where not kept."""
    kept: Tensor | None
    """bool `[T, K]`."""
    position: Tensor | None
    """int64 `[T, K]`: in the expert's buffer of the token's group; 0 where not kept."""
    num_groups: int
    capacity: int | None
    """Rows that an expert takes from one group; None routes without dropping."""
    chosen: Tensor
    """int64 `[E]`: choices of each expert before its capacity decided."""
    aux_loss: Tensor
    """Scalar before its coefficient: the mean over what the router balances, groups for one."""
    aux_units: Tensor
    """Scalar: how many of those this call has."""
    z_loss: Tensor
    """Scalar before its coefficient: mean over real tokens of the squared logsumexp of the logits (ST-MoE,
    arXiv 2202.08906, eq. 5)."""
    entropy: Tensor
    """Scalar, in nats: mean over real tokens of the entropy of their probabilities over the experts."""
    rejected: Tensor
    """Share of the real tokens' choices that the second-expert policy turned down."""
    dropped: Tensor
    """Share of the real tokens' choices that found their expert full."""
    num_choices: Tensor
    """int64 scalar: choices of real tokens, the denominator of both shares."""
    num_tokens: Tensor
    """int64 scalar: real tokens."""

    def detached(self) -> "Routing":
        """The same, only to be looked at."""
        weight = None if self.weight is None else self.weight.detach()
        assignments = replace(self.assignments, weight=self.assignments.weight.detach())
        aux_loss, z_loss = self.aux_loss.detach(), self.z_loss.detach()
        return replace(self, assignments=assignments, weight=weight, aux_loss=aux_loss, z_loss=z_loss)

    @property
    def load(self) -> Tensor:
        """int64 `[E]`: kept choices of each expert."""
        return self.assignments.load
