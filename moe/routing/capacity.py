"""Expert capacity: the order in which choices fill an expert's buffer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.routing.assignments import counted


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

    def limited(self, capacity: int | None) -> "Queues":
        """The requests within `capacity`."""
        return self if capacity is None else Queues(self.position, self.length.clamp(max=capacity))


def queue_up(expert: Tensor, asks: Tensor, num_experts: int, priority: Tensor | None = None) -> Queues:
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
    length = counted(flat, num_groups * (num_experts + 1))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)
    position = rank - (length.cumsum(0) - length)[flat]
    return Queues(
        position.view(num_groups, per_token, group_tokens).transpose(1, 2),
        length.view(num_groups, num_experts + 1)[:, :num_experts],
    )
