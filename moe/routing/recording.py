"""Recordings of routing: the experts that tokens chose, to be replayed in other forward passes (`moe.routing.replay`).

In reinforcement learning, one engine generates the sequences and another trains on them, with different rounding: a
token near a tie would go to other experts, which changes its probability.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moe.routing.router import AnyRouter, Router, none_passed, routed_layers
from moe.routing.routing import Routing
from moe.routing.state import RoutingState
from moe.routing.tokens import TokenContext
from moe.spec.routers import RouterSpec


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

    def stacked(self) -> Tensor:
        """int64 `[L, T, K]`: all L layers in order as one tensor, for a file; missing rows are -1. Raises ValueError if
        K differs between layers."""
        by_layer = list(self.values())
        if len(widths := {rows.shape[1] for rows in by_layer}) > 1:
            raise ValueError(
                f"experts per token (={sorted(widths)}) must be one number to be stacked; keep the layers apart"
            )
        longest = max(map(len, by_layer), default=0)
        return torch.stack([_longer(rows, longest) for rows in by_layer])


def _by_position(layer: int, calls: list[tuple[Tensor, Tensor]]) -> Tensor:
    ids, expert = (torch.cat(parts) for parts in zip(*calls, strict=True))
    real = ids >= 0
    ids, expert = ids[real], expert[real]
    table = expert.new_full((int(ids.max()) + 1 if ids.numel() else 0, expert.shape[1]), -1)
    table[ids] = expert
    if not torch.equal(table[ids], expert):
        position = int(ids[(table[ids] != expert).any(1)][0])
        raise ValueError(
            f"position {position} (in layer {layer}) must choose the same experts whenever it is recorded; give each "
            "token its own place in the batch, tokens.ids, or record each call by itself"
        )
    return table


def merged_recordings(*recordings: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Merge recordings of parts of a batch, from ranks with some of its tokens or layers. Raises ValueError for a
    position with conflicting choices."""
    result: dict[int, Tensor] = {}
    for layer, rows in (item for recording in recordings for item in recording.items()):
        before = result.get(layer, rows)
        longest = max(len(before), len(rows))
        earlier, later = _longer(before, longest), _longer(rows, longest)
        if bool(((earlier != later) & (earlier >= 0) & (later >= 0)).any()):
            raise ValueError(
                f"layer {layer} must have one choice of each position; merge recordings of one batch"
            )
        result[layer] = torch.maximum(earlier, later)
    return dict(sorted(result.items()))


def _longer(rows: Tensor, number: int) -> Tensor:
    return torch.cat((rows, rows.new_full((number - len(rows), rows.shape[1]), -1)))


@contextmanager
def recorded(model: nn.Module) -> Iterator[Recording]:
    """Record the choices of every MoE layer of `model` in the forward passes within the context.

    Under activation recomputation, a position must choose the same experts each time. Raises ValueError for a model
    without MoE layers, for routers by expert choice, and if no layer was called: a captured program bypasses the
    router.
    """
    recording, layers = Recording(), routed_layers(model, "recorded")
    before = [layer.route for layer in layers]
    for layer in layers:
        layer.route = _RecordingRouter(layer.route, recording)
    try:
        yield recording
    finally:
        for layer, route in zip(layers, before, strict=True):
            layer.route = route
    if not recording:
        raise none_passed("recorded")


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
