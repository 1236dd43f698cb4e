"""Top-k routing by softmax: Mixtral (arXiv 2401.04088), OLMoE, Qwen3 and their kin."""

from torch import Tensor

from moe.routing.balance import load_balancing_loss
from moe.routing.router import Router
from moe.routing.routing import Routing
from moe.routing.state import RoutingState
from moe.routing.token_choice import admit_choices
from moe.routing.tokens import TokenContext
from moe.routing.top_k import top_k
from moe.spec.routers import SoftmaxTopKSpec


class SoftmaxTopK(Router[SoftmaxTopKSpec]):
    """Each token goes to its K best experts, weighted by their probabilities among all experts or among the K."""

    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        probs_GSE = logits.softmax(dim=-1)
        expert = top_k(logits, self.spec.top_k)
        if self.spec.softmax == "after_topk" or self.spec.renormalizes:
            # Probabilities over their sum are just this, without a gradient of rounding noise for experts not chosen.
            weight = logits.gather(-1, expert).softmax(dim=-1)
        else:
            weight = probs_GSE.gather(-1, expert)
        balance = load_balancing_loss(
            self.spec.aux_scope, probs_GSE, expert, tokens.real(logits), tokens, state
        )
        return admit_choices(self.spec, tokens, logits, probs_GSE, expert, weight, balance)
