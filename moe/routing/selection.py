"""Selection of experts by tokens: top-k with deterministic ties, group limits, and admission within capacity."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moe.parallel.accelerator import accelerator
from moe.routing.assignments import Queues, queue_choices
from moe.routing.balance import entropy, z_loss
from moe.routing.choices import ChoicesByToken
from moe.routing.router import TokenContext
from moe.routing.routing import Routing
from moe.spec.routers import GatedTopKSpec, TokenChoiceSpec


def logistic(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) in the shape and dtype of `x`, within two units in the last place.

    `torch.sigmoid` uses another formula beyond the last full SIMD vector, so the scores of equal logits, and the choice
    between two experts, could depend on the number of rows.
    """
    return _Logistic.apply(x)


class _Logistic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        e = (-x.abs()).exp()
        y = torch.where(x >= 0, 1.0, e) / (1 + e)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad_y * y * (1 - y)


_ROUNDING = 64
"""Tolerance for log-probabilities that are equal up to rounding, in units of the dtype's epsilon times the largest
logit; in float32 a hundredth of the distance between a few thousand tokens."""


def top_k(scores: Tensor, k: int) -> Tensor:
    """int64 `[..., k]`: indices of the k highest scores in the last dimension, best first; ties go to the lower index.

    `torch.topk` leaves the order of ties undefined, and it may change with the number of rows.
    """
    num_best = min(k + 1, scores.shape[-1])
    best, index = scores.detach().topk(num_best, dim=-1)
    if _may_be_true(scores.device, best[..., 1:] == best[..., :-1]):
        index = scores.detach().sort(dim=-1, descending=True, stable=True).indices
    return index[..., :k]


def top_k_within(scores: Tensor, k: int, tolerance: Tensor, tie_breaker: Tensor) -> Tensor:
    """`top_k` in which scores at most `tolerance` apart are equal: ties go to the higher value in `tie_breaker`, with
    the same tolerance, and then to the lower index.

    `scores` and `tie_breaker` `[..., E]`, `tolerance` `[..., 1]`. Equality is transitive: a chain of
    close scores is one tie.
    """
    num_best = min(k + 1, scores.shape[-1])
    best, index = scores.detach().topk(num_best, dim=-1)
    if not _may_be_true(scores.device, best[..., :-1] - best[..., 1:] <= tolerance):
        return index[..., :k]
    num_scores = scores.shape[-1]
    return top_k(
        -_dense_ranks(scores.detach(), tolerance) * num_scores - _dense_ranks(tie_breaker.detach(), tolerance), k
    )


def rounding_unit(logits: Tensor, real: Tensor) -> Tensor:
    """`[G]`: the dtype's epsilon times 1 plus the largest absolute value of each group's `logits` `[G, S, E]` of `real`
    tokens. Groups must not be empty."""
    largest_G = logits.detach().abs().masked_fill(~real[..., None], 0.0).flatten(1).amax(1)
    return torch.finfo(logits.dtype).eps * (1 + largest_G)


def ranks_up_to_rounding(probabilities: Tensor, logits: Tensor, real: Tensor) -> Tensor:
    """int64 `[G, ..., n]`: dense rank of each of `probabilities` `[G, ..., n]` in the last dimension, 0 for the
    highest, equal for values that are equal up to rounding. The tolerance follows from the `logits` `[G, S, E]` of
    `real` tokens `[G, S]`.

    Tokens that are equal in exact arithmetic, such as the first of two documents, differ by rounding on ranks that sum
    in another order. Selection by these ranks, with ties in token order, is the same everywhere.
    """
    if not probabilities.numel():
        return torch.zeros_like(probabilities, dtype=torch.int64)
    tolerance_G = _ROUNDING * rounding_unit(logits, real)
    return _dense_ranks(probabilities.detach().log(), tolerance_G.view(-1, *[1] * (probabilities.dim() - 1)))


def _may_be_true(device: torch.device, conditions: Tensor) -> bool:
    """Whether any of `conditions` is True; assumed on a GPU, to avoid a synchronization."""
    return accelerator(device).runs_ahead or bool(conditions.any())


def _dense_ranks(scores: Tensor, tolerance: Tensor) -> Tensor:
    """int64 `[..., E]`: dense rank, 0 for the highest; scores at most `tolerance` apart have the same rank."""
    sorted_scores, index = scores.sort(dim=-1, descending=True)
    steps = functional.pad(sorted_scores[..., :-1] - sorted_scores[..., 1:] > tolerance, (1, 0))
    return torch.empty_like(index).scatter_(-1, index, steps.cumsum(-1))


def keep_best_groups(spec: GatedTopKSpec, scores: Tensor, num_best: int) -> Tensor:
    """Return the scores `wanted` `[G, S, E]`, with -inf for experts outside the token's best groups. A group ranks by
    the sum of its `num_best` best scores."""
    if spec.expert_groups_per_token == spec.num_expert_groups:
        return scores
    by_group = scores.unflatten(-1, (spec.num_expert_groups, -1))
    strength = by_group.topk(min(num_best, by_group.shape[-1]), dim=-1).values.sum(-1)
    best = top_k(strength, spec.expert_groups_per_token)
    is_best = torch.zeros_like(strength, dtype=torch.bool).scatter_(-1, best, True)
    return by_group.masked_fill(~is_best[..., None], -torch.inf).flatten(-2)


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
        priority = -ranks_up_to_rounding(wanted_GSK.flatten(1), logits, real_GS).view_as(weight)
    queues = queue_choices(expert, asks_GSK, num_experts, priority)
    kept_GSK = asks_GSK & queues.admits(capacity)
    return build_routing(
        logits, probs, expert, torch.where(kept_GSK, weight, 0.0), kept_GSK, queues, queues.within_capacity(capacity),
        is_accepted=asks_GSK, real=real_GS, capacity=capacity, balance=balance,
    )  # fmt: skip


def build_routing(
    logits: Tensor,
    probs: Tensor,
    expert: Tensor,
    weight: Tensor,
    is_kept: Tensor,
    queues: Queues,
    slots: Queues,
    *,
    is_accepted: Tensor,
    real: Tensor,
    capacity: int | None,
    balance: tuple[Tensor, Tensor],
) -> Routing:
    """Build the `Routing` of choices `[G, S, K]` from the `is_kept` mask.

    `queues` has the position of each choice in its expert's buffer, `slots` that of the kept ones without gaps;
    `is_accepted` bool `[G, S, K]` marks choices of `real` `[G, S]` tokens that no policy rejected.
    """
    position = torch.where(is_kept, queues.position, 0)
    by_token = (expert.flatten(0, 1), weight.flatten(0, 1), is_kept.flatten(0, 1), position.flatten(0, 1))
    choices = ChoicesByToken(*by_token, slots)
    num_tokens = real.sum()
    num_choices = num_tokens * expert.shape[-1]
    num_accepted = is_accepted.sum()
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
