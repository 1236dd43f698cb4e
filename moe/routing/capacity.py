"""Queues before experts: whom one with few capacity slots takes first."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.routing.assignments import counted


@dataclass(frozen=True)
class Queues:
    """Everyone who asked for an expert of a group, in the order in which it takes them."""

    position: Tensor
    """int64 `[G, S, K]`: how many come before; of no meaning for who did not ask."""
    length: Tensor
    """int64 `[G, E]`: how many asked."""

    def admits(self, capacity: int | None) -> Tensor:
        """bool `[G, S, K]`: who finds a place, of those who asked."""
        if capacity is None:
            return torch.ones_like(self.position, dtype=torch.bool)
        return self.position < capacity

    def limited(self, capacity: int | None) -> "Queues":
        """Those who find a place."""
        return self if capacity is None else Queues(self.position, self.length.clamp(max=capacity))


def queue_up(expert: Tensor, asks: Tensor, num_experts: int, priority: Tensor | None = None) -> Queues:
    """Line up choices before their experts, group by group: first choices before second ones, then tokens in order;
    or, where `priority` is given, the highest first.

    `expert` int64 `[G, S, K]`, the choices; `asks` bool `[G, S, K]`, which of them count; `priority` `[G, S, K]`.
    """
    num_groups, group_tokens, per_token = expert.shape
    queue = torch.where(asks, expert, num_experts)  # who does not ask stands in a queue of its own
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
