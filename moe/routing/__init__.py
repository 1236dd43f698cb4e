"""Routing of tokens to experts: routers, one file per family, capacity and load balancing."""

from typing import Any

from torch import Tensor

from moe.deprecation import resolve_alias
from moe.routing.assignments import Assignments
from moe.routing.balance import follow_load
from moe.routing.checks import check_inference, is_dense, is_integer, kind_of
from moe.routing.choices import Choices, SortedChoices
from moe.routing.expert_choice import ExpertChoice
from moe.routing.gshard import GShardTop2
from moe.routing.recording import Recording, merge_recordings, record_routing, replay_routing
from moe.routing.router import BatchCounts, Router, RoutingState, TokenContext, at_least_float32, resolve_context
from moe.routing.routing import Routing
from moe.routing.sigmoid import SigmoidTopK
from moe.routing.sinkhorn import SinkhornTopK
from moe.routing.softmax import SoftmaxTopK
from moe.routing.sparsemixer import SparseMixer
from moe.routing.switch import SwitchTop1
from moe.spec import MoESpec
from moe.spec.routers import (
    ExpertChoiceSpec,
    GShardTop2Spec,
    RouterSpec,
    SigmoidTopKSpec,
    SinkhornTopKSpec,
    SoftmaxTopKSpec,
    SparseMixerSpec,
    SwitchTop1Spec,
)

ROUTERS: dict[type[RouterSpec], type[Router[Any]]] = {
    GShardTop2Spec: GShardTop2,
    SwitchTop1Spec: SwitchTop1,
    SoftmaxTopKSpec: SoftmaxTopK,
    SigmoidTopKSpec: SigmoidTopK,
    SinkhornTopKSpec: SinkhornTopK,
    SparseMixerSpec: SparseMixer,
    ExpertChoiceSpec: ExpertChoice,
}
"""Router class by spec class. Routers from elsewhere are added here and to `moe.spec.routers.ROUTERS`."""


_ALIASES = {"recorded": "record_routing", "replayed": "replay_routing", "merged_recordings": "merge_recordings"}
"""Deprecated names and the new ones."""


def __getattr__(name: str) -> Any:
    return resolve_alias(__name__, name, _ALIASES, globals())


def build_router(spec: MoESpec) -> Router[Any]:
    """Build the router that `spec` selects."""
    return ROUTERS[type(spec.routing)](spec.routing)


def route(
    logits: Tensor, spec: MoESpec, tokens: TokenContext | None = None, layer: int = 0, state: RoutingState | None = None
) -> Routing:
    """Route tokens to experts with the router that `spec` selects.

    `logits` `[G, S, E]`, any float dtype; groups are independent, and padded logits count as zeros. Random choices are
    keyed by `layer` and by the step, seed and ids in `tokens`. Raises ValueError for arguments of a wrong type or
    shape, and for `tokens` that do not match the logits.
    """
    if not isinstance(spec, MoESpec):
        raise ValueError(f"spec (={type(spec).__name__}) must be a MoESpec")
    if not is_dense(logits) or not logits.is_floating_point():
        raise ValueError(f"logits (={kind_of(logits)}) must be a dense tensor of floating-point numbers")
    if logits.dim() != 3 or logits.shape[-1] != spec.num_experts:
        raise ValueError(f"logits {tuple(logits.shape)} must be [groups, tokens per group, {spec.num_experts} experts]")
    tokens = resolve_context(tokens, logits.device)
    group_shape = logits.shape[:2]
    for name, tensor in (("ids", tokens.ids), ("padding", tokens.padding)):
        if tensor is not None and tensor.shape not in (group_shape, (group_shape.numel(),)):
            remedy = "transpose it" if tensor.shape == group_shape[::-1] else "reshape it"
            raise ValueError(
                f"tokens.{name} {tuple(tensor.shape)} must have the shape {tuple(group_shape)} of logits without E, "
                f"or flat; {remedy}"
            )
    if not is_integer(layer):
        raise ValueError(f"layer (={layer!r}) must be a whole number")
    if not isinstance(state, RoutingState | None):
        raise ValueError(f"state (={type(state).__name__}) must be a RoutingState, or None")
    state = state or RoutingState()
    state.check(spec.num_experts, logits.device)
    router = build_router(spec)
    if state.replayed is not None:
        if not router.replays:
            raise ValueError(
                f"router (={spec.routing.router}) must let tokens choose experts and support replayed "
                "choices if state.replayed is given; omit it"
            )
        state.check_replayed((*group_shape, spec.experts_per_token), spec.num_experts)
    check_inference("logits", logits, (logits,))
    check_inference("tokens.padding", tokens.padding, (logits,))
    logits = at_least_float32(logits)
    if tokens.padding is not None:
        logits = logits.masked_fill(tokens.padding.reshape(*group_shape, 1), 0.0)
    return router(logits, tokens, layer, state)


__all__ = [
    "ROUTERS", "Assignments", "BatchCounts", "Choices", "SortedChoices", "Recording", "Router", "Routing",
    "RoutingState", "TokenContext", "build_router", "follow_load", "merge_recordings", "record_routing",
    "replay_routing", "route",
]  # fmt: skip
