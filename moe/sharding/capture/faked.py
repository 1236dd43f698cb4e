"""Fake tensors in the place of a batch's and a module's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def fake(value: Any, mode: Any, device: torch.device | str) -> Any:
    def one(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        with mode:
            return torch.empty(each.shape, dtype=each.dtype, device=device)

    return pytree.tree_map(one, value)


@contextmanager
def faked(module: nn.Module, mode: Any, device: torch.device) -> Iterator[None]:
    """The module with fake parameters and buffers, one for each that there is."""
    made: dict[int, Tensor] = {}
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    again: list[tuple[dict[str, Any], str, list[Any], list[Any]]] = []

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            made[id(tensor)] = (
                nn.Parameter(like, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else like
            )
        return made[id(tensor)]

    try:
        for each in module.modules():
            for name in HELD_AGAIN if isinstance(each, nn.RNNBase) else ():
                again.append((vars(each), name, getattr(each, name), list(getattr(each, name))))
            for held in (each._parameters, each._buffers):
                kept.append((held, dict(held)))
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = fake(tensor)  # type: ignore[assignment]
        yield
    finally:
        for held, before in kept:
            held.clear()
            held.update(before)
        for attributes, name, those, items in again:
            those[:] = items
            attributes[name] = those


HELD_AGAIN = ("_flat_weights", "_flat_weight_refs")
"""Lists in which torch's recurrent layers hold their parameters once more, which follow whatever parameters are set."""
