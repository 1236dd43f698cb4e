"""SparseMixer routing (arXiv 2310.00811 and 2409.12136), with the constants of the released Phi-3.5-MoE."""

from typing import Any

import torch
from torch import Tensor

from moe.random import Purpose, fold, gumbel, uniform
from moe.routing.balance import load_balancing_loss
from moe.routing.router import Router, RoutingState, TokenContext
from moe.routing.routing import Routing
from moe.routing.selection import admit_choices, top_k
from moe.spec.routers import SparseMixerSpec

_MIDPOINT_PROBABILITY = 0.75
"""Probability of the reduced weight for a choice that is not the most probable one (Heun's third-order method)."""
_MIDPOINT_WEIGHT = 0.3333
"""Factor of the reduced weight; 1/3 in the paper."""


class SparseMixer(Router[SparseMixerSpec]):
    """Two experts per token, chosen one after the other among candidates whose logits are near the highest. A weight is
    the probability among the candidates.

    In training candidates are sampled by Gumbel noise, and logits get the gradient of Heun's third-order estimator;
    evaluation chooses the highest logit and draws no random numbers.
    """

    replays = True

    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        draws = _Draws(tokens, layer) if tokens.training and self.spec.chooses_at_random else None
        expert, weight = self._choose(logits, state, draws)
        probs_GSE = logits.softmax(dim=-1)
        balance = load_balancing_loss(self.spec.aux_scope, probs_GSE, expert, tokens.real(logits), tokens, state)
        return admit_choices(self.spec, tokens, logits, probs_GSE, expert, weight, balance)

    def choose_for_inference(self, logits: Tensor, state: RoutingState) -> tuple[Tensor, Tensor]:
        return self._choose(logits, state, None)

    def _choose(self, logits_GSE: Tensor, state: RoutingState, draws: "_Draws | None") -> tuple[Tensor, Tensor]:
        """(experts, weights), each `[G, S, 2]`."""
        replayed = (None, None) if state.replayed is None else state.replayed.split(1, dim=-1)
        experts: list[Tensor] = []
        weights: list[Tensor] = []
        remaining_GSE = logits_GSE
        for choice in range(2):
            masked_GSE = remaining_GSE.masked_fill(self._is_far(logits_GSE, remaining_GSE), -torch.inf)
            scores_GSE = masked_GSE.detach()
            if draws is not None:
                scores_GSE = scores_GSE + draws.gumbel(scores_GSE, choice)
            expert = RoutingState(replayed=replayed[choice]).apply_replay(top_k(scores_GSE, 1))
            if replayed[choice] is not None:  # a replayed expert is a candidate, whatever its logit
                masked_GSE = masked_GSE.scatter(-1, expert, logits_GSE.gather(-1, expert))
            probs_GSE = masked_GSE.softmax(dim=-1)
            if draws is None:
                weight = probs_GSE.gather(-1, expert)
            else:
                weight = _SampledWeight.apply(logits_GSE, probs_GSE.detach(), expert, draws.uniform(logits_GSE, choice))
            experts.append(expert)
            weights.append(weight)
            remaining_GSE = remaining_GSE.scatter(-1, expert, -torch.inf)
        return torch.cat(experts, dim=-1), torch.cat(weights, dim=-1)

    @torch.no_grad()
    def _is_far(self, logits_GSE: Tensor, remaining_GSE: Tensor) -> Tensor:
        """bool `[G, S, E]`: whether an expert is no candidate, by the highest of the `remaining` logits."""
        highest_GS1 = remaining_GSE.amax(dim=-1, keepdim=True)
        scale_GSE = torch.maximum(logits_GSE.abs(), highest_GS1)
        return (highest_GS1 - logits_GSE) / scale_GSE > 2 * self.spec.jitter_noise


class _Draws:
    """Random numbers of one layer's tokens, keyed by step, seed, layer, choice and token."""

    def __init__(self, tokens: TokenContext, layer: int) -> None:
        self._tokens, self._key = tokens, fold(tokens.seed, tokens.step, layer)

    def gumbel(self, scores: Tensor, choice: int) -> Tensor:
        """Gumbel noise in the shape `[G, S, E]` of `scores`."""
        key = fold(self._key, Purpose.GUMBEL, choice)
        return gumbel(key, self._tokens.keys(scores), scores.shape[-1]).to(scores.dtype)

    def uniform(self, scores: Tensor, choice: int) -> Tensor:
        """Uniform numbers in [0, 1), float64 `[G, S, 1]`."""
        return uniform(fold(self._key, Purpose.HEUN_STEP, choice), self._tokens.keys(scores))[..., None]


class _SampledWeight(torch.autograd.Function):
    """Weights `[G, S, 1]` of sampled experts, with Heun's third-order estimator of the gradient in the logits.

    The weight is the probability p of the expert, or a third of it with probability 3/4 if the expert is not the most
    probable one. The gradient is that of p in either case (arXiv 2409.12136, section 2.1).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probs: Tensor, expert: Tensor, draws: Tensor) -> Tensor:
        weight = probs.gather(-1, expert)
        ctx.save_for_backward(probs, expert, weight)
        is_whole = (expert == top_k(probs, 1)) | (draws > _MIDPOINT_PROBABILITY)
        return torch.where(is_whole, weight, _MIDPOINT_WEIGHT * weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probs, expert, weight = ctx.saved_tensors
        gradient = gradients[0] * weight
        return (-gradient * probs).scatter_add(-1, expert, gradient), None, None, None
