"""Replay of recorded routing: tokens go to the recorded experts instead of the router's choices.

Weights come from the layer's own logits, so gradients flow as usual; capacity, second-expert policies, auxiliary losses
and load statistics apply as usual too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from moe.routing.router import AnyRouter, RoutedLayer, Router, none_passed, routed_layers
from moe.routing.routing import Routing
from moe.routing.state import RoutingState
from moe.routing.tokens import TokenContext, is_dense, kind_of
from moe.spec.routers import RouterSpec


@contextmanager
def replayed(model: nn.Module, recording: Mapping[int, Tensor] | Tensor) -> Iterator[None]:
    """Replay a recording in the forward passes of `model` within the context: each token takes the experts in its
    position's row, or the router's choice if that row is -1.

    `recording` maps layer numbers to `[T, K]` of any integer dtype, or is `[L, T, K]` for the MoE layers in order. Rows
    are indexed by `TokenContext.ids`, for any part of the batch and any layout. With activation recomputation, the
    backward pass belongs in the context too. Raises ValueError for routers by expert choice, a recording of a wrong
    shape, a token without a row, and if no layer was called: a captured program bypasses the router.
    """
    layers = routed_layers(model, "replayed")
    rows = _by_layer(recording, layers)
    for layer in layers:
        _check(layer, rows[layer.layer])
    before = [layer.route for layer in layers]
    replayers = [_ReplayingRouter(layer.route, rows[layer.layer]) for layer in layers]
    for layer, replayer in zip(layers, replayers, strict=True):
        layer.route = replayer
    try:
        yield
    finally:
        for layer, route in zip(layers, before, strict=True):
            layer.route = route
    if not any(replayer.has_replayed for replayer in replayers):
        raise none_passed("replayed")


def _by_layer(recording: Mapping[int, Tensor] | Tensor, layers: list[RoutedLayer]) -> dict[int, Tensor]:
    numbers = sorted({layer.layer for layer in layers})
    if isinstance(recording, Tensor):
        if recording.dim() != 3 or len(recording) != len(numbers):
            raise ValueError(
                f"recording {tuple(recording.shape)} must be [{len(numbers)} layers, T, K], for the model has experts "
                f"in the layers {numbers}; give a mapping by their numbers where it has more"
            )
        return dict(zip(numbers, recording, strict=True))
    if missing := [number for number in numbers if number not in recording]:
        raise ValueError(
            f"recording (of the layers {sorted(recording)}) must have the choices of every layer of the model that has "
            f"experts, and those of {missing} are missing; record the whole model"
        )
    return {number: recording[number] for number in numbers}


def _check(layer: RoutedLayer, rows: Tensor) -> None:
    place, spec = f"recording[{layer.layer}]", layer.spec
    if (
        not is_dense(rows)
        or rows.dtype.is_floating_point
        or rows.dtype.is_complex
        or rows.dtype == torch.bool
    ):
        raise ValueError(f"{place} (={kind_of(rows)}) must be a dense tensor of whole numbers; convert it")
    if rows.dim() != 2 or rows.shape[1] != spec.experts_per_token:
        raise ValueError(
            f"{place} {tuple(rows.shape)} must be [positions, {spec.experts_per_token} experts of each], as the "
            "layer chooses them; replay what a model of the same routers chose"
        )
    unknown = rows >= spec.num_experts
    if bool(unknown.any()):
        raise ValueError(
            f"{place} (has {int(rows[unknown][0])}) must have numbers of experts below {spec.num_experts}; replay "
            "what a model of as many experts chose"
        )
    num_chosen = (rows >= 0).sum(1)
    twice = rows.sort(1).values.diff(dim=1).eq(0).any(1) & (num_chosen > 0)
    is_partial = (num_chosen > 0) & (num_chosen < rows.shape[1])
    if bool((wrong := twice | is_partial).any()):
        position = int(wrong.nonzero()[0])
        raise ValueError(
            f"{place}[{position}] (={rows[position].tolist()}) must be different experts, or -1 for all where the "
            "layer is to choose; correct it"
        )


class _ReplayingRouter(Router[RouterSpec]):
    """Router that hands recorded choices `[T, K]` to another one."""

    replays = True

    def __init__(self, router: AnyRouter, rows: Tensor) -> None:
        super().__init__(router.spec)
        self._router, self._rows, self.has_replayed = router, rows, False

    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        self._rows, self.has_replayed = self._rows.to(logits.device), True
        ids, real = tokens.keys(logits), tokens.real(logits)
        num_rows = len(self._rows)
        if bool((beyond := real & ((ids < 0) | (ids >= num_rows))).any()):
            raise ValueError(
                f"tokens.ids (has {int(ids[beyond][0])}) must be below {num_rows}, the positions that "
                f"recording[{layer}] has; record the whole batch, or give ids that count within it"
            )
        if num_rows:
            choices = self._rows[torch.where(real, ids, 0)].to(torch.int64).masked_fill(~real[..., None], -1)
            state = replace(state, replayed=choices)
        return self._router(logits, tokens, layer, state)
