"""From choices to the rows that dispatchers consume."""

import torch
from torch import Tensor

from moe.routing.capacity import Queues
from moe.routing.routing import Assignments, counted, positions


def assign_choices(
    expert: Tensor, weight: Tensor, kept: Tensor, position: Tensor, places: Queues
) -> Assignments:
    """A row for each kept choice, from `[T, K]` choices of tokens in order.

    `places` has the kept choices without gaps, `position` is what the rows carry.
    """
    num_tokens, per_token = expert.shape
    held_EG = places.length.t()
    num_groups = held_EG.shape[1]
    first_row_EG = _starts(held_EG.reshape(-1)).view_as(held_EG)
    load = held_EG.sum(1)
    counts = load.tolist()
    num_rows = sum(counts)

    group = torch.arange(num_groups, device=expert.device)[:, None, None]
    row = first_row_EG[expert.view(*places.position.shape), group] + places.position
    row = torch.where(kept, row.reshape(num_tokens, per_token), num_rows)
    choice = torch.arange(row.numel(), device=row.device)
    choice_of_row = row.new_empty(num_rows + 1).scatter_(0, row.reshape(-1), choice)[:num_rows]
    return Assignments(
        token=choice_of_row // max(1, per_token),
        expert=expert.reshape(-1)[choice_of_row],
        weight=weight.reshape(-1)[choice_of_row],
        position=position.reshape(-1)[choice_of_row],
        rows_by_token=row.reshape(-1)[positions(kept.reshape(-1), num_rows)],
        first_by_token=_starts(kept.sum(1)),
        load=load,
        counts=counts,
    )


def assign_tokens(token: Tensor, weight: Tensor, kept: Tensor, num_tokens: int) -> Assignments:
    """The same where experts choose: `token` int64, `weight` and bool `kept` `[E, G, C]`, each expert's buffers."""
    capacity, load = token.shape[-1], kept.sum((1, 2))
    counts = load.tolist()
    buffer = positions(kept.reshape(-1), sum(counts))
    owner = token.reshape(-1)[buffer]
    return Assignments(
        token=owner,
        expert=buffer // max(1, kept[0].numel()),
        weight=weight.reshape(-1)[buffer],
        position=buffer % max(1, capacity),
        rows_by_token=owner.argsort(stable=True),
        first_by_token=_starts(counted(owner, num_tokens)),
        load=load,
        counts=counts,
    )


def _starts(counts: Tensor) -> Tensor:
    """Where each of some runs begins, that follow one another and are this long."""
    return counts.cumsum(0) - counts
