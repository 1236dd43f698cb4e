"""Base class of routers, which choose the experts of each token."""

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
    """Maps router logits to a `Routing`. Holds its own part of the layer's spec and no state."""

    replays: ClassVar[bool] = False
    """Whether it supports replayed choices, by `RoutingState.taken`."""

    def __init__(self, spec: OwnSpec) -> None:
        self.spec = spec

    @abstractmethod
    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        """Route groups of tokens by `logits` `[G, S, E]`, float32 or wider.

        Groups are independent. Random choices are keyed by `layer` and by the step, seed and ids in `tokens`.
        Evaluation draws no random numbers and drops no tokens.
        """

    def inferred(self, logits: Tensor, state: RoutingState) -> tuple[Tensor, Tensor] | None:
        """(experts, weights), each `[G, S, K]`, of tokens without padding in evaluation, skipping all training
        statistics. None if the router has no shortcut."""
        return None


AnyRouter = Router[Any]


@runtime_checkable
class RoutedLayer(Protocol):
    """MoE layer whose router may be replaced for a while."""

    spec: MoESpec
    layer: int
    route: AnyRouter


def routed_layers(model: nn.Module, what: str) -> list[RoutedLayer]:
    """MoE layers of `model`, whose routing is to be `what`, for example "recorded". Raises ValueError if there are
    none, and for a router that does not support replay."""
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
    """Error of a model whose routing was to be `what`, and that called no MoE layer."""
    return ValueError(
        f"model must pass a layer of experts for its routing to be {what}, and has passed none; call the module "
        "itself, not a program that was captured of it"
    )


def widened(logits: Tensor) -> Tensor:
    """Return `logits` in at least float32."""
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)
