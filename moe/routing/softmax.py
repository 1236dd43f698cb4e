"""Softmax top-k routing: Mixtral (arXiv 2401.04088), OLMoE, Qwen3 and similar models."""

from torch import Tensor

from moe.routing.balance import load_balancing_loss
from moe.routing.router import Router, RoutingState, TokenContext
from moe.routing.routing import Routing
from moe.routing.selection import admit_choices, keep_best_groups, top_k
from moe.spec.routers import SoftmaxTopKSpec


class SoftmaxTopK(Router[SoftmaxTopKSpec]):
    """Top-k router by logits, or by probabilities plus selection bias if there is one; optionally group-limited.
    Weights are probabilities over all experts or over the K chosen ones."""

    replays = True

    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        probs_GSE = logits.softmax(dim=-1)
        expert, weight = self._choose(logits, probs_GSE, state)
        balance = load_balancing_loss(self.spec.aux_scope, probs_GSE, expert, tokens.real(logits), tokens, state)
        return admit_choices(self.spec, tokens, logits, probs_GSE, expert, weight, balance)

    def choose_for_inference(self, logits: Tensor, state: RoutingState) -> tuple[Tensor, Tensor]:
        return self._choose(logits, logits.softmax(dim=-1), state)

    def _choose(self, logits: Tensor, probs_GSE: Tensor, state: RoutingState) -> tuple[Tensor, Tensor]:
        """(experts, weights), each `[G, S, K]`."""
        spec, wanted_GSE = self.spec, logits.detach()
        if state.bias is not None:
            wanted_GSE = probs_GSE.detach() + state.bias.to(logits.dtype)
        expert = state.apply_replay(top_k(keep_best_groups(spec, wanted_GSE, num_best=1), spec.top_k))
        if spec.softmax == "after_topk" or spec.renormalizes:
            # Equal to the probabilities over their sum, without rounding noise in the gradients of other experts.
            weight = logits.gather(-1, expert).softmax(dim=-1)
        else:
            weight = probs_GSE.gather(-1, expert)
        if spec.routed_scaling_factor != 1:
            weight = weight * spec.routed_scaling_factor
        return expert, weight
