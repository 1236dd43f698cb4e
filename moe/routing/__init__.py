"""Scores to experts: a file a family of routers, capacity, balance."""

from torch import Tensor

from moe.routing.gshard import route_top2
from moe.routing.routing import Assignments, Routing
from moe.routing.tokens import TokenContext
from moe.spec import MoESpec


def route(logits: Tensor, spec: MoESpec, tokens: TokenContext | None = None, layer: int = 0) -> Routing:
    """Assign tokens to experts with the router that `spec` names.

    `logits` `[G, S, E]`, any float dtype; groups are independent of one another. `layer` keys the random
    choices together with the step, seed and ids in `tokens`.
    """
    if logits.dim() != 3 or logits.shape[-1] != spec.num_experts:
        raise ValueError(
            f"logits {tuple(logits.shape)} must be [groups, tokens a group, {spec.num_experts} experts]"
        )
    return route_top2(logits, spec, tokens or TokenContext(), layer)


__all__ = ["Assignments", "Routing", "TokenContext", "route"]
