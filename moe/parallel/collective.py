"""Errors of failed collectives, which name the collective and the rank."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe.activity import doing

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Their names since torch 2.13, or the older ones."""
_MAX_MESSAGE_CHARS = 200
_SOURCE_LOCATION = re.compile(r"^\[\S+:\d+\] ")
_GLOO_ADVICE = ". This is typically caused by a remote worker hanging"


class CollectiveError(RuntimeError):
    """A collective failed or timed out, most often because another rank died or is stuck."""


_action: str | None = None
"""A variable of the module, not of a thread: autograd runs backward passes of a GPU in threads of its own."""


@contextmanager
def during_action(name: str) -> Iterator[None]:
    """Name the action of a pipeline schedule that runs in the context, for the errors of its collectives. Actions are
    not nested."""
    global _action
    _action = name
    try:
        yield
    finally:
        _action = None


@contextmanager
def keeping_action() -> Iterator[None]:
    """Context in which another action may run."""
    global _action
    action = _action
    try:
        yield
    finally:
        _action = action


@contextmanager
def collective(name: str) -> Iterator[None]:
    """Name the collective that runs in the context, for example "all-to-all of rows, MoE layer 3". Raises
    CollectiveError if it fails."""
    if _action is not None:
        name = f"{name} ({_action})"
    try:
        if torch.compiler.is_compiling():
            yield
        else:
            with doing("collective", name):
                yield
    except (CollectiveError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:  # the only type that torch's backends raise
        raise CollectiveError(
            f"{name} failed on rank {dist.get_rank()} of {dist.get_world_size()}, most often "
            f"because another rank died or was late; see its log ({_shorten(error)})"
        ) from error


def _shorten(error: RuntimeError) -> str:
    """Return the first line of a backend's message, without its source location and gloo's advice. The traceback has
    the whole message."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return _SOURCE_LOCATION.sub("", line).partition(_GLOO_ADVICE)[0][:_MAX_MESSAGE_CHARS]


Shard = TypeVar("Shard")


class PairedCollective(torch.autograd.Function):
    """One collective of `rows` in the forward pass and another in the backward pass: its transpose, if ranks use the
    result differently. Both are functions of a tensor and `shard`, a description of the exchange."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        shard: Shard,
        forward_collective: Callable[[Tensor, Shard], Tensor],
        backward_collective: Callable[[Tensor, Shard], Tensor],
    ) -> Tensor:
        ctx.settings = shard, backward_collective
        return forward_collective(rows, shard)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        shard, backward_collective = ctx.settings
        return backward_collective(gradients[0], shard), None, None, None
