"""A model laid out: its parameters placed, its modules told of the layout, blocks cut up one after another."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe.parallel.fsdp import shard_block
from moe.parallel.mesh import Layout
from moe.parallel.parameters import Splits, place
from moe.parallel.tensor import SharesTokens
from moe.plan.placement import FSDP_AXES, Placement, Placements

Model = TypeVar("Model", bound=nn.Module)


@runtime_checkable
class Wired(Protocol):
    """A module that does something differently where it is laid out."""

    def wire(self, layout: Layout) -> None:
        """Take note of the layout, once this rank's parameters are in place."""


def apply(
    model: Model,
    placements: Iterable[Placement],
    layout: Layout,
    blocks: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Model:
    """The model, with this rank's part of each of its parameters where `placements` say, and nowhere else.

    `blocks` are the paths of what FSDP gathers as one, in order, each with its name in the errors of collectives; the
    model itself, whose path is empty, comes last, with what is in none of them. Each is cut up as soon as it is
    placed, so that a model never lies on a rank as a whole. Raises SpecError for a parameter that is placed nowhere, a
    placement of none, and where a degree does not divide a dimension.
    """
    blocks, given = dict(blocks or {"": "the model"}), Placements(placements)
    waiting: dict[str, dict[str, Splits]] = {path: {} for path in blocks}
    for name, parameter in model.named_parameters():
        path = name
        while path not in blocks:
            path = path.rpartition(".")[0]
        waiting[path][name] = given.of(name, parameter.shape).over(layout.degrees)
    given.check_used()
    for path, label in blocks.items():
        gathered = {}
        for name, splits in waiting[path].items():
            if splits and splits[-1][0] in FSDP_AXES:
                gathered[name.removeprefix(f"{path}." if path else "")] = splits[-1]
                splits = splits[:-1]
            place(model, name, splits, layout, seed)
        if path and layout.recompute == "full":
            recompute(model.get_submodule(path))
        shard_block(model.get_submodule(path), gathered, layout, label, keep_gathered=not path)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            zeros = torch.zeros_like(buffer, device=layout.device)
            setattr(module, name, zeros if buffer.is_meta else buffer.to(layout.device))
        if isinstance(module, SharesTokens):
            module.tensor_group = layout.group("tensor")
        if isinstance(module, Wired):
            module.wire(layout)
    return model


def recompute(block: nn.Module) -> None:
    """Keep of a block's forward pass its input alone, and make it again in the backward pass."""
    forward = block.forward

    def from_its_input(*inputs: Any) -> Any:
        if torch.is_grad_enabled():
            return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)
        return forward(*inputs)

    block.forward = from_its_input
