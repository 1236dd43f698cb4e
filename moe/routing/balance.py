"""Load balancing: auxiliary losses, z-loss, and selection biases that follow the load."""

from typing import Any

import torch
from torch import Tensor

from moe.routing.router import RoutingState, TokenContext
from moe.routing.routing import Routing
from moe.spec import MoESpec
from moe.spec.routers import Scope


def load_balancing_loss(
    scope: Scope, probs: Tensor, expert: Tensor, real: Tensor, tokens: TokenContext, state: RoutingState
) -> tuple[Tensor, Tensor]:
    """(auxiliary loss, number of scopes): mean over the scopes with real tokens of E · sum_e f_e · P_e; 1 when uniform.

    `probs` `[G, S, E]`; `expert` int64 `[G, S, K]`, choices before capacity; `real` bool `[G, S]`. f_e is the fraction
    of a scope's choices that went to e, P_e its mean probability
    (arXiv 2101.03961, eq. 4 to 6; with K choices, arXiv 2401.06066, eq. 12 to 14). For the global batch, f is from the
    previous step, and scopes are real tokens. Raises ValueError if a group does not divide into sequences.

    Computed as 1 + E · sum_e (f_e - 1/E) · P_e, since P sums to 1: even load, as before the first step, has a gradient
    of exactly zero, not rounding noise, which some optimizers would scale to a full step.
    """
    num_experts = probs.shape[-1]
    if scope == "global_batch":
        num_tokens = real.sum()
        mean_prob_E = torch.einsum("gse,gs->e", probs, real.to(probs.dtype)) / num_tokens.clamp(min=1)
        excess = (_excess(state.last_load, probs) * mean_prob_E).sum()
        return num_tokens.clamp(max=1) + num_experts * excess, num_tokens

    scope_tokens = tokens_per_scope(scope, probs.shape[1], tokens)
    by_scope, per_token = (real.numel() // max(1, scope_tokens), scope_tokens), expert.shape[-1]
    real_UL = real.view(by_scope)
    tokens_U = real_UL.sum(1).clamp(min=1).to(probs.dtype)
    counts_UE = choice_counts(expert.reshape(*by_scope, per_token), real_UL, num_experts)
    sums_UE = torch.einsum("ule,ul->ue", probs.view(*by_scope, num_experts), real_UL.to(probs.dtype))
    num_scopes = real_UL.any(1).sum()
    excess = (_excess(counts_UE, probs) * sums_UE / tokens_U[:, None]).sum()
    return num_scopes.clamp(max=1) + num_experts * excess / num_scopes.clamp(min=1), num_scopes


def tokens_per_scope(scope: Scope, group_tokens: int, tokens: TokenContext) -> int:
    """Tokens of a group or sequence over which load is balanced. Raises ValueError if a group does not divide into
    sequences."""
    if scope != "sequence" or tokens.sequence_tokens is None:
        return group_tokens
    if group_tokens % tokens.sequence_tokens:
        raise ValueError(
            f"groups of {group_tokens} tokens must consist of whole sequences of {tokens.sequence_tokens} tokens"
        )
    return tokens.sequence_tokens


def choice_counts(expert: Tensor, real: Tensor, num_experts: int) -> Tensor:
    """int64 `[U, E]`: choices of each expert by the real tokens of each row, from `expert` `[U, L, K]` and `real`
    `[U, L]`."""
    counts = expert.new_zeros(expert.shape[0], num_experts)
    increments = real[..., None].expand_as(expert).to(counts.dtype)
    return counts.scatter_add_(1, expert.flatten(1), increments.flatten(1))


def _excess(load: Tensor | None, probs: Tensor) -> Tensor:
    """`[..., E]`: each expert's share of `load` `[..., E]` minus 1/E; zeros without load."""
    if load is None:
        return probs.new_zeros(probs.shape[-1])
    load = load.to(probs.dtype)
    total = load.sum(-1, keepdim=True)
    return torch.where(total > 0, load / total.clamp(min=1) - 1 / probs.shape[-1], 0.0)


def z_loss(logits: Tensor, real: Tensor) -> Tensor:
    """Mean over real tokens of the squared logsumexp of `logits` `[G, S, E]` (arXiv 2202.08906, eq. 5)."""
    squares = logits.logsumexp(-1).square()
    return torch.where(real, squares, 0.0).sum() / real.sum().clamp(min=1)


@torch.no_grad()
def entropy(probs: Tensor, real: Tensor) -> Tensor:
    """Mean over real tokens of the entropy of `probs` `[G, S, E]`, in nats."""
    token_entropy = -torch.special.xlogy(probs, probs).sum(-1)
    return torch.where(real, token_entropy, 0.0).sum() / real.sum().clamp(min=1)


@torch.no_grad()
def follow_load(bias: Tensor, load: Tensor, rate: float, found_inf: Tensor | None = None) -> None:
    """Raise the selection bias `[E]` of experts below the mean load by `rate`, and lower that of experts above it, in
    place (arXiv 2408.15664, Algorithm 1), unless `found_inf` (scalar on its device) is 1."""
    load = load.to(torch.float64)
    change = rate * (load.mean() - load).sign()
    bias += (change if found_inf is None else change.masked_fill(found_inf != 0, 0.0)).to(bias.dtype)


class WithLoss(torch.autograd.Function):
    """Identity on `x`; the backward pass gives `loss`, a scalar, a gradient of 1, which is `one` if given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, one: Tensor | None) -> Tensor:
        ctx.dtype, ctx.device, ctx.one = loss.dtype, loss.device, one
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        one = torch.ones((), dtype=ctx.dtype, device=ctx.device) if ctx.one is None else ctx.one
        return gradients[0], one, None


def with_auxiliary_losses(
    x: Tensor, routing: Routing, spec: MoESpec, tokens: TokenContext, num_ranks: int = 1
) -> Tensor:
    """Return `x` unchanged; backpropagating through it includes this call's share of the weighted auxiliary losses.

    Applied to the experts' input, so that the layer's output may be modified in place.

    A call's share is its part of the batch that `tokens.batch` counts, divided by `num_ranks` ranks with the same
    routing: the shares of all micro-batches and ranks add up to the loss of the batch. The caller's loss must be
    divided by global counts too, and not scaled otherwise.
    """
    coefficient, scope = spec.routing.auxiliary_loss
    if not (tokens.training and torch.is_grad_enabled() and (coefficient or spec.z_coefficient)):
        return x
    if routing.weighted_loss is not None:
        share = routing.weighted_loss
        return (
            WithLoss.apply(x, share if num_ranks == 1 else share / num_ranks, routing.one) if share.requires_grad else x
        )
    aux_units, num_tokens = _in_batch(routing, scope, tokens)
    share = coefficient * routing.aux_loss * routing.aux_units / aux_units
    if spec.z_coefficient:
        share = share + spec.z_coefficient * routing.z_loss * routing.num_tokens / num_tokens
    return WithLoss.apply(x, share / num_ranks, None) if share.requires_grad else x


def _in_batch(routing: Routing, scope: Scope, tokens: TokenContext) -> tuple[Tensor | int, Tensor | int]:
    """(units of the auxiliary loss, real tokens) in the global batch."""
    counts = tokens.batch
    if counts is None:
        return routing.aux_units.clamp(min=1), routing.num_tokens.clamp(min=1)
    by_scope = {"group": counts.num_groups, "sequence": counts.num_sequences, "global_batch": counts.num_tokens}
    return by_scope[scope], counts.num_tokens
