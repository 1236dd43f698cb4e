"""DeepSeek-V3's routing: sigmoid scores, limited to few groups of experts, balanced by a bias that follows the loads
(arXiv 2412.19437, section 2.1.2; 2408.15664)."""

import torch
from torch import Tensor

from moe.routing.balance import load_balancing_loss
from moe.routing.logistic import logistic
from moe.routing.router import Router
from moe.routing.routing import Routing
from moe.routing.state import RoutingState
from moe.routing.token_choice import admit_choices
from moe.routing.tokens import TokenContext
from moe.routing.top_k import top_k
from moe.spec.routers import SigmoidTopKSpec


class SigmoidTopK(Router[SigmoidTopKSpec]):
    """Each token goes to the K experts of the highest biased scores, weighted by their scores without bias."""

    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        spec = self.spec
        scores_GSE = logistic(logits)
        wanted_GSE = scores_GSE.detach()
        if state.bias is not None:
            wanted_GSE = wanted_GSE + state.bias.to(wanted_GSE.dtype)
        expert = top_k(self._in_best_groups(wanted_GSE), spec.top_k)

        weight = scores_GSE.gather(-1, expert)
        if spec.renormalizes:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        weight = weight * spec.routed_scaling_factor
        probs_GSE = scores_GSE / (scores_GSE.sum(-1, keepdim=True) + 1e-20)  # eq. 19
        balance = load_balancing_loss(spec.aux_scope, probs_GSE, expert, tokens.real(logits), tokens, state)
        return admit_choices(spec, tokens, logits, probs_GSE, expert, weight, balance)

    def _in_best_groups(self, wanted_GSE: Tensor) -> Tensor:
        """The scores of experts that stand for choice; -inf for those in a group that is not among the best, by the
        sum of its two best."""
        spec = self.spec
        if spec.expert_groups_per_token == spec.num_expert_groups:
            return wanted_GSE
        by_group = wanted_GSE.unflatten(-1, (spec.num_expert_groups, -1))
        strength = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        best = top_k(strength, spec.expert_groups_per_token)
        stands = torch.zeros_like(strength, dtype=torch.bool).scatter_(-1, best, True)
        return by_group.masked_fill(~stands[..., None], -torch.inf).flatten(-2)
