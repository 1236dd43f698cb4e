"""Rules of operators that have no index equation here: options along one axis that DTensor's own rules offer."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor, fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from moe.sharding import torch_private
from moe.sharding.operands import operands, replace_operands, results, shape_of
from moe.sharding.placement import WHOLE, AxisPlacement, partial, split
from moe.sharding.rules.dims import unsplit
from moe.sharding.rules.rule import AxisOption, Rule


def rule(node: fx.Node) -> Rule | None:
    """Rule with DTensor's options; None if DTensor only runs the operator on whole tensors."""
    shapes = [shape_of(operand) for operand in operands(node)]
    result_shapes = [() if result is None else tuple(result.shape) for result in results(node)]
    if not (axis_options := tuple(options(node))):
        return None
    return Rule(
        operands=tuple(map(unsplit, shapes)),
        results=tuple(map(unsplit, result_shapes)),
        sizes={},
        extra_options=axis_options,
        shapes=(*shapes, *result_shapes),
    )


def options(node: fx.Node) -> Iterator[AxisOption]:
    """Distinct options that DTensor offers besides whole tensors."""
    arguments = replace_operands(node, lambda _, operand: operand.meta["val"])
    tensors = [operand.meta["val"] for operand in operands(node)]
    is_complex = any(tensor.is_complex() for tensor in tensors)  # complex numbers have no maximum
    seen_options: set[tuple[tuple[AxisPlacement, ...], tuple[AxisPlacement, ...]]] = set()
    for placements in _probes(tensors):
        for before, after in _strategies(node.target, arguments, node.meta.get("val"), placements):
            axis_placements = (
                [_to_placement(placement) for placement in before],
                [_to_placement(placement) for placement in after],
            )
            if None in axis_placements[0] or None in axis_placements[1]:
                continue
            option: Any = tuple(axis_placements[0]), tuple(axis_placements[1])
            if is_complex and any(placement.combine in ("max", "min") for placement in (*option[0], *option[1])):
                continue
            if option in seen_options or set(option[0]) <= {WHOLE}:
                continue
            seen_options.add(option)
            yield AxisOption("torch's " + ", ".join(map(str, option[0])), *option)


def _probes(tensors: list[Tensor]) -> Iterator[list[Placement]]:
    """Placements of operands to query DTensor with, since the options of many of its rules depend on them."""
    replicated: list[Placement] = [Replicate()] * len(tensors)
    yield replicated
    for number, tensor in enumerate(tensors):
        for placement in (*map(Shard, range(tensor.dim())), *map(Partial, ("sum", "max", "min"))):
            yield [*replicated[:number], placement, *replicated[number + 1 :]]
            if number == 0 and all(operand.dim() == tensor.dim() for operand in tensors):
                yield [placement] * len(tensors)


def _strategies(target: Any, arguments: Any, result: Any, placements: list[Placement]) -> list[Any]:
    try:
        return torch_private.strategies(target, arguments, result, placements, _mesh())
    except Exception:  # DTensor's rules may raise anything for placements they do not support
        return []


@cache
def _mesh() -> Any:
    return torch_private.two_ranks()


def _to_placement(placement: Placement | None) -> AxisPlacement | None:
    """DTensor's placement as ours; None for kinds that are not supported here."""
    if placement is None or type(placement) is Replicate:
        return WHOLE
    if type(placement) is Shard:
        return split(placement.dim)
    if type(placement) is Partial and placement.reduce_op in ("sum", "max", "min"):
        return partial(placement.reduce_op)  # type: ignore[arg-type]
    return None
