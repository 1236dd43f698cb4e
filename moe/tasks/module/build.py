"""Build a user module and its batches. Callers must have checked permission to call the job's functions."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe.sharding.arguments import register_data_classes
from moe.spec import ModuleDataSpec, ModuleModelSpec, spec_error
from moe.tasks.module.code import import_function

Batch = tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""Positional or keyword arguments of one module call."""


def build(spec: ModuleModelSpec, seed: int) -> nn.Module:
    """Build the module with initial values drawn from `seed` by its own code.

    Raises SpecError if the result is not a module.
    """
    return call_builder(import_function(spec.build, "model.build"), spec.options, seed, "model.build", spec.build)


def build_without_values(spec: ModuleModelSpec, seed: int) -> nn.Module:
    """Like `build`, without values if the module's code allows it."""
    return build_on_meta(import_function(spec.build, "model.build"), spec.options, seed, "model.build", spec.build)


def call_builder(function: Callable[..., Any], options: dict[str, Any], seed: int, path: str, code: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        module = function(**options)
    if not isinstance(module, nn.Module):
        raise spec_error("wrong_type", path, code, f"must return a torch.nn.Module, not {type(module).__name__}",
                    "return the module from it")  # fmt: skip
    return module


def build_on_meta(function: Callable[..., Any], options: dict[str, Any], seed: int, path: str, code: str) -> nn.Module:
    """Build on the meta device, or with values if the code needs them."""
    try:
        with torch.device("meta"):
            return call_builder(function, options, seed, path, code)
    except (NotImplementedError, RuntimeError):
        return call_builder(function, options, seed, path, code)


def batches(spec: ModuleDataSpec, seed: int) -> Callable[[int], Batch]:
    """Function from step (from 0) to global batch."""
    function = import_function(spec.batches, "data.batches")
    return lambda step: to_batch(function(seed, step))


def to_batch(arguments: Any) -> Batch:
    """Call arguments from a list or tuple, a mapping, or a single value."""
    register_data_classes(arguments)
    return arguments if isinstance(arguments, list | tuple | Mapping) else (arguments,)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Batch with its tensors moved to a device."""
    device_batch: Batch = pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
    return device_batch


def num_rows(batch: Batch) -> int:
    """Size of dim 0 of the first tensor; 1 without any."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return max(1, leaf.shape[0])
    return 1


def digest(batch: Batch) -> str:
    """Hash of a batch's content."""
    hasher = hashlib.sha256()
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            hasher.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            hasher.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            hasher.update(json.dumps(leaf, default=lambda value: type(value).__name__).encode())
    return hasher.hexdigest()[:16]
