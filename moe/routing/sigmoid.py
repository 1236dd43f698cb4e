"""DeepSeek-V3's routing: sigmoid scores, group-limited, with a selection bias that follows the load
(arXiv 2412.19437, section 2.1.2; 2408.15664)."""

from torch import Tensor

from moe.routing.balance import load_balancing_loss
from moe.routing.router import Router, RoutingState, TokenContext
from moe.routing.routing import Routing
from moe.routing.selection import admit_choices, keep_best_groups, logistic, top_k
from moe.spec.routers import SigmoidTopKSpec


class SigmoidTopK(Router[SigmoidTopKSpec]):
    """Top-k router by sigmoid scores plus bias; the weights are the scores without bias."""

    replays = True

    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        scores_GSE = logistic(logits)
        expert, weight = self._choose(scores_GSE, state)
        probs_GSE = scores_GSE / (scores_GSE.sum(-1, keepdim=True) + 1e-20)  # eq. 19
        balance = load_balancing_loss(self.spec.aux_scope, probs_GSE, expert, tokens.real(logits), tokens, state)
        return admit_choices(self.spec, tokens, logits, probs_GSE, expert, weight, balance)

    def choose_for_inference(self, logits: Tensor, state: RoutingState) -> tuple[Tensor, Tensor]:
        return self._choose(logistic(logits), state)

    def _choose(self, scores_GSE: Tensor, state: RoutingState) -> tuple[Tensor, Tensor]:
        """(experts, weights), each `[G, S, K]`."""
        spec = self.spec
        wanted_GSE = scores_GSE.detach()
        if state.bias is not None:
            wanted_GSE = wanted_GSE + state.bias.to(wanted_GSE.dtype)
        expert = state.apply_replay(top_k(keep_best_groups(spec, wanted_GSE, num_best=2), spec.top_k))

        weight = scores_GSE.gather(-1, expert)
        if spec.renormalizes:
            weight = weight / (weight.sum(-1, keepdim=True) + spec.renormalize_eps)
        return expert, weight * spec.routed_scaling_factor
