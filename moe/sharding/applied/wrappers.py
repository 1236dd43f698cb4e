"""Torch's wrappers for data-parallel training, refused around applied modules: they would broadcast, shard or reduce
this rank's shards as if every rank had the same."""

from torch import nn

from moe.sharding import torch_private


def refuse_wrapper(name: str) -> None:
    """Raises TypeError for a wrapper of this name."""
    raise TypeError(
        f"{name} must not wrap an applied module or its submodules, which already shard parameters and reduce "
        f"gradients; use the applied module directly, or wrap the original module with {name}"
    )


def _check(module: nn.Module, name: str) -> None:
    if isinstance(module, nn.Module) and any(map(torch_private.refuses_composable, module.modules())):
        refuse_wrapper(name)


torch_private.before_wrapping(_check)
