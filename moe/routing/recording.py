"""Recording of the experts that tokens chose, and its replay in other forward passes.

In reinforcement learning, one engine generates the sequences and another trains on them, with different rounding: a
token near a tie would go to other experts, which changes its probability. In a replay, tokens go to the recorded
experts. Weights come from the layer's own logits, so gradients flow as usual; capacity, second-expert policies,
auxiliary losses and load statistics apply as usual too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from moe.deprecation import warn_renamed
from moe.routing.checks import is_dense, kind_of
from moe.routing.router import AnyRouter, Router, RoutingState, TokenContext
from moe.routing.routing import Routing
from moe.spec import MoESpec
from moe.spec.routers import RouterSpec


@runtime_checkable
class RoutedLayer(Protocol):
    """MoE layer whose router may be replaced for a while."""

    spec: MoESpec
    layer: int
    route: AnyRouter


def find_routed_layers(model: nn.Module, action: str) -> list[RoutedLayer]:
    """MoE layers of `model`. Raises ValueError if there are none, and for a router that does not support replay;
    `action`, "recorded" or "replayed", is for its message."""
    layers: list[RoutedLayer] = [
        module for module in model.modules() if isinstance(module, RoutedLayer) and isinstance(module.route, Router)
    ]
    if not layers:
        raise ValueError(f"model (={type(model).__name__}) must have MoE layers for its routing to be {action}")
    for layer in layers:
        if not layer.route.replays:
            raise ValueError(
                f"router (={layer.spec.routing.router}, of layer {layer.layer}) must let tokens choose "
                f"experts and support replayed choices for its routing to be {action}; use another router"
            )
    return layers


def no_layer_ran(action: str) -> ValueError:
    """Error of a model that called no MoE layer while its routing was `action`: "recorded" or "replayed"."""
    return ValueError(
        f"model must run an MoE layer for its routing to be {action}, and has run none; call the "
        "module itself, not a captured program"
    )


class Recording(Mapping[int, Tensor]):
    """Choices before capacity by layer number, int64 `[T, K]` by preference: one row per position of the batch, as
    `TokenContext.ids` number them; -1 for padding and positions without a token."""

    def __init__(self) -> None:
        self._calls: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def note(self, layer: int, ids: Tensor, expert: Tensor) -> None:
        """Add the choices `[t, K]` of the positions `ids` `[t]`; negative ids are ignored."""
        self._calls.setdefault(layer, []).append((ids, expert))

    def __getitem__(self, layer: int) -> Tensor:
        """Choices of a layer. Synchronizes the device. Raises ValueError if a position was recorded with different
        choices."""
        return _by_position(layer, self._calls[layer])

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._calls))

    def __len__(self) -> int:
        return len(self._calls)

    def stack(self) -> Tensor:
        """int64 `[L, T, K]`: all L layers in order as one tensor, for a file; missing rows are -1. Raises ValueError if
        K differs between layers."""
        by_layer = list(self.values())
        if len(widths := {rows.shape[1] for rows in by_layer}) > 1:
            raise ValueError(
                f"experts per token (={sorted(widths)}) must be equal to be stacked; keep the layers separate"
            )
        longest = max(map(len, by_layer), default=0)
        return torch.stack([_longer(rows, longest) for rows in by_layer])

    def stacked(self) -> Tensor:
        """Deprecated name of `stack`."""
        warn_renamed("Recording.stacked", "Recording.stack")
        return self.stack()


def _by_position(layer: int, calls: list[tuple[Tensor, Tensor]]) -> Tensor:
    ids, expert = (torch.cat(parts) for parts in zip(*calls, strict=True))
    real = ids >= 0
    ids, expert = ids[real], expert[real]
    table = expert.new_full((int(ids.max()) + 1 if ids.numel() else 0, expert.shape[1]), -1)
    table[ids] = expert
    if not torch.equal(table[ids], expert):
        position = int(ids[(table[ids] != expert).any(1)][0])
        raise ValueError(
            f"position {position} (in layer {layer}) must choose the same experts each time it is "
            "recorded; give each token its own position, tokens.ids, or record each call separately"
        )
    return table


def merge_recordings(*recordings: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Merge recordings of parts of a batch, from ranks with some of its tokens or layers. Raises ValueError for a
    position with conflicting choices."""
    result: dict[int, Tensor] = {}
    for layer, rows in (item for recording in recordings for item in recording.items()):
        merged = result.get(layer, rows)
        longest = max(len(merged), len(rows))
        first, second = _longer(merged, longest), _longer(rows, longest)
        if bool(((first != second) & (first >= 0) & (second >= 0)).any()):
            raise ValueError(f"layer {layer} must have one choice per position; merge recordings of one batch")
        result[layer] = torch.maximum(first, second)
    return dict(sorted(result.items()))


def _longer(rows: Tensor, number: int) -> Tensor:
    return torch.cat((rows, rows.new_full((number - len(rows), rows.shape[1]), -1)))


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Recording]:
    """Record the choices of every MoE layer of `model` in the forward passes within the context.

    Under activation recomputation, a position must choose the same experts each time. Raises ValueError for a model
    without MoE layers, for routers by expert choice, and if no layer was called: a captured program bypasses the
    router.
    """
    recording, layers = Recording(), find_routed_layers(model, "recorded")
    before = [layer.route for layer in layers]
    for layer in layers:
        layer.route = _RecordingRouter(layer.route, recording)
    try:
        yield recording
    finally:
        for layer, route in zip(layers, before, strict=True):
            layer.route = route
    if not recording:
        raise no_layer_ran("recorded")


class _RecordingRouter(Router[RouterSpec]):
    """Router that records the choices of another one."""

    replays = True

    def __init__(self, router: AnyRouter, recording: Recording) -> None:
        super().__init__(router.spec)
        self._router, self._recording = router, recording

    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        routing = self._router(logits, tokens, layer, state)
        assert routing.expert is not None
        ids = torch.where(tokens.real(logits), tokens.keys(logits), -1).reshape(-1)
        self._recording.note(layer, ids, routing.expert)
        return routing


@contextmanager
def replay_routing(model: nn.Module, recording: Mapping[int, Tensor] | Tensor) -> Iterator[None]:
    """Replay a recording in the forward passes of `model` within the context: each token takes the experts in its
    position's row, or the router's choice if that row is -1.

    `recording` maps layer numbers to `[T, K]` of any integer dtype, or is `[L, T, K]` for the MoE layers in order. Rows
    are indexed by `TokenContext.ids`, for any part of the batch and any layout. With activation recomputation, the
    backward pass belongs in the context too. Raises ValueError for routers by expert choice, a recording of a wrong
    shape, a token without a row, and if no layer was called: a captured program bypasses the router.
    """
    layers = find_routed_layers(model, "replayed")
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
        raise no_layer_ran("replayed")


def _by_layer(recording: Mapping[int, Tensor] | Tensor, layers: list[RoutedLayer]) -> dict[int, Tensor]:
    numbers = sorted({layer.layer for layer in layers})
    if isinstance(recording, Tensor):
        if recording.dim() != 3 or len(recording) != len(numbers):
            raise ValueError(
                f"recording {tuple(recording.shape)} must be [{len(numbers)} layers, T, K], for the MoE "
                f"layers {numbers}; pass a mapping by their numbers if it has more"
            )
        return dict(zip(numbers, recording, strict=True))
    if missing := [number for number in numbers if number not in recording]:
        raise ValueError(
            f"recording (of the layers {sorted(recording)}) must have the choices of every MoE "
            f"layer, but those of {missing} are missing; record the whole model"
        )
    return {number: recording[number] for number in numbers}


def _check(layer: RoutedLayer, rows: Tensor) -> None:
    place, spec = f"recording[{layer.layer}]", layer.spec
    if not is_dense(rows) or rows.dtype.is_floating_point or rows.dtype.is_complex or rows.dtype == torch.bool:
        raise ValueError(f"{place} (={kind_of(rows)}) must be a dense tensor of whole numbers; convert it")
    if rows.dim() != 2 or rows.shape[1] != spec.experts_per_token:
        raise ValueError(
            f"{place} {tuple(rows.shape)} must be [positions, {spec.experts_per_token} experts per "
            "position], as in the layer; replay choices of a model with the same routers"
        )
    unknown = rows >= spec.num_experts
    if bool(unknown.any()):
        raise ValueError(
            f"{place} (has {int(rows[unknown][0])}) must have expert numbers below "
            f"{spec.num_experts}; replay choices of a model with as many experts"
        )
    num_chosen = (rows >= 0).sum(1)
    twice = rows.sort(1).values.diff(dim=1).eq(0).any(1) & (num_chosen > 0)
    is_partial = (num_chosen > 0) & (num_chosen < rows.shape[1])
    if bool((wrong := twice | is_partial).any()):
        position = int(wrong.nonzero()[0])
        raise ValueError(
            f"{place}[{position}] (={rows[position].tolist()}) must be different experts, or all -1 "
            "to let the layer choose; correct it"
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
                f"tokens.ids (has {int(ids[beyond][0])}) must be below {num_rows}, the number of "
                f"positions of recording[{layer}]; record the whole batch, or pass ids within it"
            )
        if num_rows:
            choices = self._rows[torch.where(real, ids, 0)].to(torch.int64).masked_fill(~real[..., None], -1)
            state = replace(state, replayed=choices)
        return self._router(logits, tokens, layer, state)
