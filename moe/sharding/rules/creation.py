"""Operators that create a tensor without operands: each rank creates its part."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from moe.sharding.operands import results
from moe.sharding.rules.dims import factor_dims, sizes_of
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Lower, Rule

aten = torch.ops.aten


def _made_by(lower: Lower) -> Callable[[fx.Node], Rule]:
    def rule(node: fx.Node) -> Rule:
        shape = tuple(results(node)[0].shape)
        return Rule((), (factor_dims(shape),), sizes_of((factor_dims(shape), shape)), lower=lower)

    return rule


def _fill(local: LocalCall) -> fx.Node:
    """Lowering of an operator whose first argument is the shape."""
    _, *rest = local.node.args
    return local.call(local.node.target, list(local.part_shape()), *rest, **local.node.kwargs)


def _split(local: LocalCall) -> bool:
    return any(option.factor is not None for option in local.options)


def _arange(local: LocalCall) -> fx.Node:
    if not _split(local):
        return local.default()
    args: Sequence[Any] = local.node.args
    start, step = (0 if len(args) == 1 else args[0]), (args[2] if len(args) > 2 else 1)
    value = results(local.node)[0]
    return local.call(part_of_range, start, step, local.first("d0"), local.size("d0"), value.dtype,
                      value.device)  # fmt: skip


def _linspace(local: LocalCall) -> fx.Node:
    if not _split(local):
        return local.default()
    start, end, count = local.node.args[:3]
    value = results(local.node)[0]
    return local.call(part_of_linspace, start, end, count, local.first("d0"), local.size("d0"), value.dtype,
                      value.device)  # fmt: skip


def _eye(local: LocalCall) -> fx.Node:
    if not _split(local):
        return local.default()
    value = results(local.node)[0]
    first = [local.first(f"d{dim}") if value.shape[dim] > 1 else 0 for dim in range(2)]
    return local.call(part_of_eye, list(local.part_shape()), *first, value.dtype, value.device)


def part_of_range(start: float, step: float, first: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`size` values of the sequence `start`, `start + step` and so on, from position `first`."""
    positions = torch.arange(first, first + size, device=device)
    if dtype.is_floating_point:
        positions = positions.to(torch.float64)
    return (start + positions * step).to(dtype)


def part_of_linspace(
    start: float, end: float, count: int, first: int, size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """`size` of `count` equally spaced values, from position `first` on. As in torch, the second half is computed from
    the end."""
    positions = torch.arange(first, first + size, dtype=torch.float64, device=device)
    step = (end - start) / max(1, count - 1)
    from_start, from_end = start + step * positions, end - step * (count - 1 - positions)
    return torch.where(positions < count // 2, from_start, from_end).to(dtype)


def part_of_eye(
    shape: Sequence[int], first_row: int, first_column: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Part of an identity matrix whose first element is at the given position."""
    rows = torch.arange(first_row, first_row + shape[0], device=device)
    columns = torch.arange(first_column, first_column + shape[1], device=device)
    return (rows[:, None] == columns).to(dtype)


_FILLED, _RANGE = _made_by(_fill), _made_by(_arange)

RULES = {
    aten.full.default: _FILLED,
    aten.zeros.default: _FILLED,
    aten.ones.default: _FILLED,
    aten.empty.memory_format: _FILLED,
    aten.scalar_tensor.default: _made_by(LocalCall.default),
    aten.arange.default: _RANGE,
    aten.arange.start: _RANGE,
    aten.arange.start_step: _RANGE,
    aten.linspace.default: _made_by(_linspace),
    aten.eye.default: _made_by(_eye),
    aten.eye.m: _made_by(_eye),
}


def is_constant(node: fx.Node) -> bool:
    """Whether an operator creates the same tensor each time."""
    return node.target in RULES and node.target is not aten.empty.memory_format
