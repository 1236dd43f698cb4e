"""Contract of routers: they decide which experts each token of each group goes to."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from moe.routing.routing import Routing
from moe.routing.state import RoutingState
from moe.routing.tokens import TokenContext
from moe.spec import MoESpec
from moe.spec.routers import RouterSpec

OwnSpec = TypeVar("OwnSpec", bound=RouterSpec)


class Router(ABC, Generic[OwnSpec]):
    """Scores to assignments. It holds its own part of a layer's spec and nothing else."""

    replays: ClassVar[bool] = False
    """Whether it takes the choices that its state has to be replayed, by `RoutingState.taken`."""

    def __init__(self, spec: OwnSpec) -> None:
        self.spec = spec

    @abstractmethod
    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        """The routing of groups of tokens with `logits` `[G, S, E]`, float32 or wider.

        Every group is routed on its own. `layer` keys random choices together with the step, seed and ids in
        `tokens`. Evaluation draws nothing and drops nothing.
        """

    def inferred(self, logits: Tensor, state: RoutingState) -> tuple[Tensor, Tensor] | None:
        """Experts and weights, `[G, S, K]` each, of tokens without padding in evaluation, as a call gives them, and
        nothing that only training looks at. None where a router has no shorter way to them."""
        return None


AnyRouter = Router[Any]


@runtime_checkable
class RoutedLayer(Protocol):
    """A layer of experts, whose router may be put into another one for a while."""

    spec: MoESpec
    layer: int
    route: AnyRouter


def routed_layers(model: nn.Module, what: str) -> list[RoutedLayer]:
    """The layers of experts of a model, whose routing is to be `what`: recorded, say. Raises ValueError where there are
    none, and for a router that does not replay choices."""
    layers: list[RoutedLayer] = [
        module
        for module in model.modules()
        if isinstance(module, RoutedLayer) and isinstance(module.route, Router)
    ]
    if not layers:
        raise ValueError(
            f"model (={type(model).__name__}) must have layers of experts for its routing to be {what}"
        )
    for layer in layers:
        if not layer.route.replays:
            raise ValueError(
                f"router (={layer.spec.routing.router}, of layer {layer.layer}) must let tokens choose experts, and "
                f"know of replayed choices, for its routing to be {what}; use another router"
            )
    return layers


def none_passed(what: str) -> ValueError:
    """The error of a model whose routing was to be `what`, and that passed no layer of experts."""
    return ValueError(
        f"model must pass a layer of experts for its routing to be {what}, and has passed none; call the module "
        "itself, not a program that was captured of it"
    )


def widened(logits: Tensor) -> Tensor:
    """Scores and weights are computed in float32 at least."""
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)
