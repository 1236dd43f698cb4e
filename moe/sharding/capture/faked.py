"""Replacement of the tensors of a batch or a module by fake tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def fake(value: Any, mode: Any, device: torch.device | str) -> Any:
    def fake_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)

    return pytree.tree_map(fake_leaf, value)


@contextmanager
def with_fake_tensors(module: nn.Module, mode: Any, device: torch.device) -> Iterator[None]:
    """Context in which the module's parameters and buffers are fake; tied ones share one fake tensor."""
    fakes: dict[int, Tensor] = {}
    originals: list[tuple[dict[str, Any], dict[str, Any]]] = []
    weight_lists: list[tuple[dict[str, Any], str, list[Any], list[Any]]] = []

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            fake_tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            fakes[id(tensor)] = (
                nn.Parameter(fake_tensor, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else fake_tensor
            )
        return fakes[id(tensor)]

    try:
        for submodule in module.modules():
            for name in WEIGHT_LISTS if isinstance(submodule, nn.RNNBase) else ():
                weight_lists.append((vars(submodule), name, getattr(submodule, name), list(getattr(submodule, name))))
            for tensors in (submodule._parameters, submodule._buffers):
                originals.append((tensors, dict(tensors)))
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = fake(tensor)  # type: ignore[assignment]
        yield
    finally:
        for tensors, original in originals:
            tensors.clear()
            tensors.update(original)
        for attributes, name, values, items in weight_lists:
            values[:] = items
            attributes[name] = values


WEIGHT_LISTS = ("_flat_weights", "_flat_weight_refs")
"""Lists in which torch's recurrent layers hold their parameters a second time; they are updated when a parameter is
set."""
