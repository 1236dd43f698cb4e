"""Balanced assignment by Sinkhorn's normalisation (BASE layers, arXiv 2103.16716, as Megatron-LM relaxes them)."""

import math

import torch
from torch import Tensor

from moe.routing.logistic import logistic
from moe.routing.router import Router
from moe.routing.routing import Routing
from moe.routing.state import RoutingState
from moe.routing.token_choice import admit_choices
from moe.routing.tokens import TokenContext
from moe.routing.top_k import rounding_unit, top_k, top_k_of_close
from moe.spec.routers import SinkhornTopKSpec

_ROUNDING = 256
"""Distance to which rounding may bring what is equal, in units of the dtype's epsilon times a group's largest logit."""


class SinkhornTopK(Router[SinkhornTopKSpec]):
    """In training each token goes to the K experts that a nearly balanced transport plan of its group gives it most
    to; in evaluation to its K best. Weights are probabilities (sigmoids of the logits where K is 1), and no
    auxiliary loss is needed.

    Some plans give as much to several experts: those of a lone token, or of tokens that are all equal. These ties go to
    the higher logit, then to the lower index, and rounding decides none of them."""

    replays = True

    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        probs_GSE = logits.softmax(dim=-1)
        real_GS = tokens.real(logits)
        expert = state.taken(
            self._choices(logits.detach(), real_GS) if tokens.training else top_k(logits, self.spec.top_k)
        )
        weight = (logistic(logits) if self.spec.top_k == 1 else probs_GSE).gather(-1, expert)
        no_loss = (logits.new_zeros(()), real_GS.sum())
        return admit_choices(self.spec, tokens, logits, probs_GSE, expert, weight, no_loss)

    def _choices(self, logits_GSE: Tensor, real_GS: Tensor) -> Tensor:
        """int64 `[G, S, K]`: the experts that the plan gives each token most to."""
        if not logits_GSE.shape[1]:
            return top_k(logits_GSE, self.spec.top_k)  # groups without tokens have no largest logit either
        wanted_GSE = transport_plan(logits_GSE, real_GS, self.spec.sinkhorn_iterations)
        within = _ROUNDING * rounding_unit(logits_GSE, real_GS)
        return top_k_of_close(wanted_GSE, self.spec.top_k, within[:, None, None], logits_GSE)


def transport_plan(logits: Tensor, real: Tensor, num_iterations: int) -> Tensor:
    """Logarithm, up to a constant for each token, of the plan `[G, S, E]` closest to exp(logits) that gives every real
    token of a group the same mass, and every expert; padding has none.

    Rows and columns are normalised in turn, in logarithms (Cuturi, arXiv 1306.0895).
    """
    num_real = real.sum(1).clamp(min=1).to(logits.dtype)[:, None]
    plan = logits.masked_fill(~real[..., None], -torch.inf)
    log_expert_share = num_real.log() - math.log(logits.shape[-1])
    for _ in range(num_iterations):
        plan = plan - plan.logsumexp(2, keepdim=True).nan_to_num(neginf=0.0)
        excess_GE = plan.logsumexp(1) - log_expert_share
        plan = plan - excess_GE.nan_to_num(neginf=0.0)[:, None]
    return torch.where(real[..., None], plan, logits)
