"""Token-choice routing: capacity queues and the resulting `Routing`."""

import torch
from torch import Tensor

from moe.routing.balance import entropy, z_loss
from moe.routing.capacity import Queues, queue_up
from moe.routing.choices import ChoicesOfTokens
from moe.routing.routing import Routing
from moe.routing.tokens import TokenContext
from moe.routing.top_k import places_of_close
from moe.spec.routers import TokenChoiceSpec


def admit_choices(
    spec: TokenChoiceSpec,
    tokens: TokenContext,
    logits: Tensor,
    probs: Tensor,
    expert: Tensor,
    weight: Tensor,
    balance: tuple[Tensor, Tensor],
) -> Routing:
    """Route every real token to its chosen experts, within capacity.

    `logits` and `probs` `[G, S, E]`; `expert` int64 and `weight` `[G, S, K]`, the choices by preference and their
    weights; `balance`: (auxiliary loss, its units).
    """
    real_GS = tokens.real(logits)
    asks_GSK = real_GS[..., None].expand_as(expert)
    num_experts = logits.shape[-1]
    capacity = spec.capacity(expert.shape[1], num_experts) if tokens.training else None
    best_first = spec.drop_by == "probability" and capacity is not None
    priority = None
    if best_first:
        wanted_GSK = weight.masked_fill(~asks_GSK, 0.0)
        priority = -places_of_close(wanted_GSK.flatten(1), logits, real_GS).view_as(weight)
    queues = queue_up(expert, asks_GSK, num_experts, priority)
    kept_GSK = asks_GSK & queues.admits(capacity)
    return routing_of_choices(
        logits, probs, expert, torch.where(kept_GSK, weight, 0.0), kept_GSK, queues, queues.limited(capacity),
        accepted=asks_GSK, real=real_GS, capacity=capacity, balance=balance,
    )  # fmt: skip


def routing_of_choices(
    logits: Tensor,
    probs: Tensor,
    expert: Tensor,
    weight: Tensor,
    kept: Tensor,
    queues: Queues,
    slots: Queues,
    *,
    accepted: Tensor,
    real: Tensor,
    capacity: int | None,
    balance: tuple[Tensor, Tensor],
) -> Routing:
    """Build the `Routing` of choices `[G, S, K]` from the `kept` mask.

    `queues` has the position of each choice in its expert's buffer, `slots` that of the kept ones without gaps;
    `accepted` bool `[G, S, K]` marks choices of `real` `[G, S]` tokens that no policy rejected.
    """
    position = torch.where(kept, queues.position, 0)
    by_token = (expert.flatten(0, 1), weight.flatten(0, 1), kept.flatten(0, 1), position.flatten(0, 1))
    choices = ChoicesOfTokens(*by_token, slots)
    num_tokens = real.sum()
    num_choices = num_tokens * expert.shape[-1]
    num_accepted = accepted.sum()
    share_of = num_choices.clamp(min=1).to(logits.dtype)
    return Routing(
        choices,
        *by_token,
        num_groups=logits.shape[0],
        capacity=capacity,
        chosen=queues.length.sum(0),
        aux_loss=balance[0],
        aux_units=balance[1],
        z_loss=z_loss(logits, real),
        entropy=entropy(probs.detach(), real),
        rejected=(num_choices - num_accepted) / share_of,
        dropped=(num_accepted - choices.load.sum()) / share_of,
        num_choices=num_choices,
        num_tokens=num_tokens,
    )
