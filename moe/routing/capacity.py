"""How many tokens of one group an expert takes, and who comes first."""

import torch
from torch import Tensor

from moe.spec import MoESpec


def expert_capacity(spec: MoESpec, group_tokens: int) -> int:
    """C, the rows of one expert's buffer for a group of S = `group_tokens` positions, padding counted.

    `released`: int(S·factor/E), at least 4 where that is 0, rounded up to a multiple of 4 where it exceeds
    `min_capacity`, and `min_capacity` otherwise (Lingvo, gshard_layers.py). `paper`: 2S/E rounded up (section 2.2).
    """
    if spec.capacity_rule == "paper":
        return max(1, -(-2 * group_tokens // spec.num_experts))
    automatic = int(group_tokens * spec.capacity_factor / spec.num_experts) or 4
    if spec.min_capacity < automatic:
        return -(-automatic // 4) * 4
    return spec.min_capacity


def running_positions(chosen: Tensor, expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Who comes first: the exclusive running count of choices of the same expert in each group.

    `chosen` bool `[G, S]`, whether a token's choice counts; `expert` int64 `[G, S]`, its choice. Returns
    positions int64 `[G, S]` (meaningless where not chosen) and how often each expert was chosen, int64 `[G, E]`.
    """
    every = torch.arange(num_experts, device=expert.device)[:, None]
    chosen_GES = (expert[:, None, :] == every) & chosen[:, None, :]  # S last: the sums walk contiguous memory
    running_GES = chosen_GES.cumsum(dim=2, dtype=torch.int32)
    position_GS = running_GES.gather(1, expert[:, None, :]).squeeze(1).to(torch.int64) - 1
    return position_GS, chosen_GES.sum(dim=2)
