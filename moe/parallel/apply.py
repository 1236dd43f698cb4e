"""Application of a layout to a model: place parameters, wire modules, shard blocks one by one."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe.parallel.context import ContextParallel
from moe.parallel.fsdp import shard_block
from moe.parallel.mesh import Layout
from moe.parallel.parameters import Splits, check_splits, place
from moe.parallel.stages import StagedModel
from moe.parallel.tensor import SequenceParallel
from moe.plan.placement import FSDP_AXES, Placement, Placements
from moe.spec import Problem, SpecError, spec_error

Model = TypeVar("Model", bound=nn.Module)


@runtime_checkable
class LayoutAware(Protocol):
    """Module whose computation depends on the layout."""

    def set_layout(self, layout: Layout) -> None:
        """Adapt to the layout, once this rank's parameters are in place."""


def apply(
    model: Model,
    placements: Iterable[Placement],
    layout: Layout,
    blocks: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Model:
    """Shard the model in place: keep this rank's part of each parameter according to `placements`. Returns the model.

    `blocks` maps paths of modules that FSDP gathers as a unit to their names in errors of collectives; the model
    itself, with the empty path, comes last, with the parameters outside blocks and those of several blocks. Blocks are
    sharded one by one, so a rank never holds the whole model. Parameters shared by modules stay shared, placed by their
    first path. Frozen parameters stay frozen. If the layout shards less than parameters, FSDP's axes split only what
    `OptimizerShards` holds.

    Raises SpecError for a parameter without a placement or the reverse, splits that its module does not support, a
    degree that does not divide a dimension, blocks that are not modules, meta tensors without initial values, context
    ranks for a model that is not `ContextParallel`, and a pipeline for one that is not a `StagedModel`.
    """
    if layout.degree("context") > 1 and not isinstance(model, ContextParallel):
        raise spec_error("unsupported", "parallel.context", layout.degree("context"),
                         f"splits rows of positions, which {type(model).__name__} does not share with other ranks",
                         "omit it, or make the model a moe.parallel.ContextParallel")  # fmt: skip
    if layout.degree("pipeline") > 1 and not isinstance(model, StagedModel):
        raise spec_error("unsupported", "parallel.pipeline", layout.degree("pipeline"),
                         f"cuts layers into stages, which {type(model).__name__} does not have",
                         "omit it, or train a language or translation model")  # fmt: skip
    blocks, placement_table = _innermost_first(model, blocks or {}), Placements(placements)
    splits_by_block: dict[str, dict[tuple[str, ...], Splits]] = {path: {} for path in blocks}
    problems: list[Problem] = []
    for names in _paths(model):
        path = next(path for path in blocks if all(_is_in(path, name) for name in names))
        splits = placement_table.placement(names[0], model.get_parameter(names[0]).shape).effective_splits(
            layout.degrees
        )
        problems += check_splits(model, names, splits, layout)
        if layout.sharding == "parameters" and {
            next(path for path in blocks if _is_in(path, name)) for name in names
        } != {path}:
            problems += _gathered_twice(names, splits)
        splits_by_block[path][names] = splits
    if layout.degree("pipeline") == 1:  # else other stages use some of them
        placement_table.check_used()
    if problems := [*problems, *_buffers_without_values(model)]:
        raise SpecError(problems)
    for path, label in blocks.items():
        fsdp_splits = {}
        for names, splits in splits_by_block[path].items():
            optimizer_split = None
            if splits and splits[-1][0] in FSDP_AXES:
                if layout.sharding == "parameters":
                    fsdp_splits[names[0].removeprefix(f"{path}." if path else "")] = splits[-1]
                else:
                    optimizer_split = splits[-1]
                splits = splits[:-1]
            place(model, names, splits, layout, seed, optimizer_split)
        block = model.get_submodule(path)
        if path and layout.recompute == "full":
            recompute(block)
        shard_block(block, fsdp_splits, layout, label, keep_gathered=not path)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            zeros = torch.zeros_like(buffer, device=layout.device)
            setattr(module, name, zeros if buffer.is_meta else buffer.to(layout.device))
        if isinstance(module, SequenceParallel):
            module.tensor_group = layout.group("tensor")
        if isinstance(module, ContextParallel):
            module.context_group = layout.group("context")
            module.context_exchange = layout.context_exchange
        if isinstance(module, LayoutAware):
            module.set_layout(layout)
    return model


def _innermost_first(model: nn.Module, blocks: Mapping[str, str]) -> dict[str, str]:
    """Order blocks with nested ones first and the model itself last."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if unknown := [path for path in blocks if path not in modules]:
        raise SpecError(
            [
                Problem("not_found", "blocks", path, "is not a module of the model", "correct its path")
                for path in unknown
            ]
        )
    paths = sorted((path for path in blocks if path), key=lambda path: -path.count("."))
    path_by_module = {id(modules[path]): path for path in reversed(paths)}
    return {path: blocks[path] for path in paths if path_by_module[id(modules[path])] == path} | {
        "": blocks.get("", "the model")
    }


def _is_in(path: str, name: str) -> bool:
    return not path or name.startswith(f"{path}.")


def _paths(model: nn.Module) -> list[tuple[str, ...]]:
    """All paths of each parameter, in the model's order."""
    paths_by_parameter: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        paths_by_parameter.setdefault(id(parameter), []).append(path)
    return [tuple(paths) for paths in paths_by_parameter.values()]


def _gathered_twice(names: tuple[str, ...], splits: Splits) -> Iterator[Problem]:
    """Problem of a parameter that several blocks share and FSDP would gather: FSDP gathers a parameter for one block
    only."""
    if any(axis in FSDP_AXES for axis, _ in splits):
        yield Problem("conflict", f"placements.{names[0]}.splits", list(splits),
                      f"must not have FSDP's axis, since {names[1]} is shared with another block",
                      "keep it whole there, or name a block that contains both")  # fmt: skip


def _buffers_without_values(model: nn.Module) -> Iterator[Problem]:
    for module_path, module in model.named_modules():
        zeros = getattr(module, "begin_with_zeros", ())
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and name not in zeros:
                yield Problem("uninitialized", f"{module_path}.{name}".lstrip("."), None,
                              "is on the meta device and has no initial values",
                              "create it on a device, or name it in its module's `begin_with_zeros`")  # fmt: skip


def recompute(block: nn.Module) -> None:
    """Enable activation recomputation: save only a block's inputs and recompute its forward pass in the backward pass,
    with the same random numbers. A block with keyed draws (`draws_by_key`) needs no saved generator state."""
    forward, by_key = block.forward, getattr(block, "draws_by_key", False)

    def recomputed_forward(*inputs: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=not by_key, **keywords)
        return forward(*inputs, **keywords)

    block.forward = recomputed_forward
