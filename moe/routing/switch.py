"""Switch Transformer's top-1 routing (arXiv 2101.03961, section 2)."""

from torch import Tensor

from moe.routing.balance import load_balancing_loss
from moe.routing.router import Router, RoutingState, TokenContext
from moe.routing.routing import Routing
from moe.routing.selection import admit_choices
from moe.spec.routers import SwitchTop1Spec


class SwitchTop1(Router[SwitchTop1Spec]):
    """Top-1 router: each token goes to its most probable expert, weighted by that probability."""

    replays = True

    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        probs_GSE = logits.softmax(dim=-1)
        expert = state.apply_replay(probs_GSE.argmax(dim=-1, keepdim=True))
        weight = probs_GSE.gather(-1, expert)
        balance = load_balancing_loss(self.spec.aux_scope, probs_GSE, expert, tokens.real(logits), tokens, state)
        return admit_choices(self.spec, tokens, logits, probs_GSE, expert, weight, balance)
