"""Rules of operators that have no index equation here: options along one axis that DTensor's own rules offer."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor, fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from moe.sharding import torch_private
from moe.sharding.operands import operands, replaced, results, shape_of
from moe.sharding.placement import WHOLE, AxisPlacement, partial, split
from moe.sharding.rules.dims import unsplit
from moe.sharding.rules.rule import AxisOption, Rule


def rule(node: fx.Node) -> Rule | None:
    """None where DTensor offers nothing but whole tensors on every rank."""
    shapes = [shape_of(each) for each in operands(node)]
    after = [() if each is None else tuple(each.shape) for each in results(node)]
    if not (given := tuple(options(node))):
        return None
    return Rule(
        operands=tuple(map(unsplit, shapes)),
        results=tuple(map(unsplit, after)),
        sizes={},
        given=given,
        shapes=(*shapes, *after),
    )


def options(node: fx.Node) -> Iterator[AxisOption]:
    """What DTensor offers beside whole tensors, each once."""
    arguments = replaced(node, lambda _, operand: operand.meta["val"])
    tensors = [each.meta["val"] for each in operands(node)]
    is_complex = any(each.is_complex() for each in tensors)  # the largest of these is not defined
    found: set[tuple[tuple[AxisPlacement, ...], tuple[AxisPlacement, ...]]] = set()
    for placements in _probes(tensors):
        for before, after in _offered(node.target, arguments, node.meta.get("val"), placements):
            ours = [_ours(each) for each in before], [_ours(each) for each in after]
            if None in ours[0] or None in ours[1]:
                continue
            option: Any = tuple(ours[0]), tuple(ours[1])
            if is_complex and any(each.combine in ("max", "min") for each in (*option[0], *option[1])):
                continue
            if option in found or set(option[0]) <= {WHOLE}:
                continue
            found.add(option)
            yield AxisOption("torch's " + ", ".join(map(str, option[0])), *option)


def _probes(tensors: list[Tensor]) -> Iterator[list[Placement]]:
    """Placements to ask with: many rules offer what suits those that the operands have."""
    whole: list[Placement] = [Replicate()] * len(tensors)
    yield whole
    for number, tensor in enumerate(tensors):
        for each in (*map(Shard, range(tensor.dim())), *map(Partial, ("sum", "max", "min"))):
            yield [*whole[:number], each, *whole[number + 1 :]]
            if number == 0 and all(other.dim() == tensor.dim() for other in tensors):
                yield [each] * len(tensors)


def _offered(target: Any, arguments: Any, result: Any, placements: list[Placement]) -> list[Any]:
    try:
        return torch_private.strategies(target, arguments, result, placements, _mesh())
    except Exception:  # its rules raise whatever they like where placements do not suit them
        return []


@cache
def _mesh() -> Any:
    return torch_private.two_ranks()


def _ours(placement: Placement | None) -> AxisPlacement | None:
    """None for kinds that there are not here."""
    if placement is None or type(placement) is Replicate:
        return WHOLE
    if type(placement) is Shard:
        return split(placement.dim)
    if type(placement) is Partial and placement.reduce_op in ("sum", "max", "min"):
        return partial(placement.reduce_op)  # type: ignore[arg-type]
    return None
