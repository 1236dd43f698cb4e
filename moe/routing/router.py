"""Contract of routers: they decide which experts each token of each group goes to."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from moe.routing.routing import Routing
from moe.routing.state import RoutingState
from moe.routing.tokens import TokenContext
from moe.spec.routers import RouterSpec

OwnSpec = TypeVar("OwnSpec", bound=RouterSpec)


class Router(ABC, Generic[OwnSpec]):
    """Scores to assignments. It holds its own part of a layer's spec and nothing else."""

    def __init__(self, spec: OwnSpec) -> None:
        self.spec = spec

    @abstractmethod
    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        """The routing of groups of tokens with `logits` `[G, S, E]`, float32 or wider.

        Every group is routed on its own. `layer` keys random choices together with the step, seed and ids in
        `tokens`. Evaluation draws nothing and drops nothing.
        """


def widened(logits: Tensor) -> Tensor:
    """Scores and weights are computed in float32 at least."""
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)
