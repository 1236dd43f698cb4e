"""Auxiliary losses, added to the backward pass of a layer's input."""

from typing import Any

import torch
from torch import Tensor

from moe.routing import Routing, TokenContext
from moe.spec import MoESpec
from moe.spec.routers import Scope


class _WithLoss(torch.autograd.Function):
    """Identity on `x`; the backward pass gives `loss` a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.saved_tensors[0]


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
    aux_units, num_tokens = _in_batch(routing, scope, tokens)
    share = coefficient * routing.aux_loss * routing.aux_units / aux_units
    if spec.z_coefficient:
        share = share + spec.z_coefficient * routing.z_loss * routing.num_tokens / num_tokens
    return _WithLoss.apply(x, share / num_ranks) if share.requires_grad else x


def _in_batch(routing: Routing, scope: Scope, tokens: TokenContext) -> tuple[Tensor | int, Tensor | int]:
    """(units of the auxiliary loss, real tokens) in the global batch."""
    counts = tokens.batch
    if counts is None:
        return routing.aux_units.clamp(min=1), routing.num_tokens.clamp(min=1)
    by_scope = {
        "group": counts.num_groups,
        "sequence": counts.num_sequences,
        "global_batch": counts.num_tokens,
    }
    return by_scope[scope], counts.num_tokens
