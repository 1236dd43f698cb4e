"""Group-limited routing: a token's experts lie in few groups of experts (DeepSeek-V2, arXiv 2405.04434, section
2.2.2)."""

import torch
from torch import Tensor

from moe.routing.top_k import top_k
from moe.spec.routers import GatedTopKSpec


def in_best_groups(spec: GatedTopKSpec, wanted: Tensor, num_best: int) -> Tensor:
    """Return the scores `wanted` `[G, S, E]`, with -inf for experts outside the token's best groups. A group ranks by
    the sum of its `num_best` best scores."""
    if spec.expert_groups_per_token == spec.num_expert_groups:
        return wanted
    by_group = wanted.unflatten(-1, (spec.num_expert_groups, -1))
    strength = by_group.topk(min(num_best, by_group.shape[-1]), dim=-1).values.sum(-1)
    best = top_k(strength, spec.expert_groups_per_token)
    stands = torch.zeros_like(strength, dtype=torch.bool).scatter_(-1, best, True)
    return by_group.masked_fill(~stands[..., None], -torch.inf).flatten(-2)
