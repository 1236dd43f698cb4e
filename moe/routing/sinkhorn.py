"""Balanced assignment by Sinkhorn normalization (BASE layers, arXiv 2103.16716, as relaxed by Megatron-LM)."""

import math

import torch
from torch import Tensor

from moe.routing.router import Router, RoutingState, TokenContext
from moe.routing.routing import Routing
from moe.routing.selection import admit_choices, logistic, rounding_unit, top_k, top_k_within
from moe.spec.routers import SinkhornTopKSpec

_ROUNDING = 256
"""Tolerance for values that are equal up to rounding, in units of the dtype's epsilon times a group's largest logit."""


class SinkhornTopK(Router[SinkhornTopKSpec]):
    """Top-k router by a nearly balanced transport plan per group in training, and by logits in evaluation. Weights are
    probabilities (sigmoids of the logits if K is 1); there is no auxiliary loss.

    Ties in the plan, such as those of a single token or of equal tokens, go to the higher logit, then to the lower
    index, regardless of rounding.
    """

    replays = True

    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        probs_GSE = logits.softmax(dim=-1)
        real_GS = tokens.real(logits)
        expert = state.apply_replay(
            self._choices(logits.detach(), real_GS) if tokens.training else top_k(logits, self.spec.top_k)
        )
        weight = (logistic(logits) if self.spec.top_k == 1 else probs_GSE).gather(-1, expert)
        no_loss = (logits.new_zeros(()), real_GS.sum())
        return admit_choices(self.spec, tokens, logits, probs_GSE, expert, weight, no_loss)

    def _choices(self, logits_GSE: Tensor, real_GS: Tensor) -> Tensor:
        """int64 `[G, S, K]`: experts with the largest mass for each token in the plan."""
        if not logits_GSE.shape[1]:
            return top_k(logits_GSE, self.spec.top_k)  # empty groups have no largest logit
        wanted_GSE = transport_plan(logits_GSE, real_GS, self.spec.sinkhorn_iterations)
        tolerance_G = _ROUNDING * rounding_unit(logits_GSE, real_GS)
        return top_k_within(wanted_GSE, self.spec.top_k, tolerance_G[:, None, None], logits_GSE)


def transport_plan(logits: Tensor, real: Tensor, num_iterations: int) -> Tensor:
    """Logarithm, up to a constant per token, of the transport plan `[G, S, E]` closest to exp(logits): equal mass for
    all real tokens of a group and for all experts, none for padding.

    Alternates row and column normalization in log space (Cuturi, arXiv 1306.0895).
    """
    num_real = real.sum(1).clamp(min=1).to(logits.dtype)[:, None]
    plan = logits.masked_fill(~real[..., None], -torch.inf)
    log_expert_share = num_real.log() - math.log(logits.shape[-1])
    for _ in range(num_iterations):
        plan = plan - plan.logsumexp(2, keepdim=True).nan_to_num(neginf=0.0)
        excess_GE = plan.logsumexp(1) - log_expert_share
        plan = plan - excess_GE.nan_to_num(neginf=0.0)[:, None]
    return torch.where(real[..., None], plan, logits)
