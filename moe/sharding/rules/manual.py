"""Manual parts: their tensors lie as the user says, along every axis."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from moe.sharding.hints.hints import Hint, Partial, Shard, pin_of
from moe.sharding.hints.manual import BACKWARD, FORWARD, ManualPart
from moe.sharding.operands import operands, results, shape_of
from moe.sharding.placement import WHOLE, AxisPlacement, partial
from moe.sharding.rules.dims import unsplit
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import AxisOption, Rule
from moe.spec import spec_error

TARGETS = (FORWARD, BACKWARD)


def manual(node: fx.Node, parts: Mapping[str, ManualPart], mesh: Mapping[str, int]) -> Rule:
    """The rule of a manual part on a mesh. Raises SpecError if a tensor cannot be split evenly."""
    part = parts[str(node.args[-1])]
    forward = _forward_of(node)
    shapes = [shape_of(operand) for operand in operands(forward)]
    result_shapes = [tuple(result.shape) for result in results(forward)]
    in_placements = _pins_of_tensors(part, "in_placements", part.arguments, shapes, mesh)
    out_placements = _pins_of_tensors(part, "out_placements", part.results, result_shapes, mesh)
    _check_even(part, (*shapes, *result_shapes), (*in_placements, *out_placements), mesh)
    options = [
        _option(
            axis,
            [placements[axis] for placements in in_placements],
            [placements[axis] for placements in out_placements],
            node.target is BACKWARD,
        )
        for axis in range(len(mesh))
    ]
    by_axis = [option.name if degree > 1 else "whole" for option, degree in zip(options, mesh.values(), strict=True)]
    before, after = (
        [shape_of(operand) for operand in operands(node)],
        [tuple(result.shape) for result in results(node)],
    )
    return Rule(
        tuple(map(unsplit, before)), tuple(map(unsplit, after)), {}, extra_options=tuple(options),
        by_axis=tuple(by_axis), shapes=(*before, *after), lower=_run,
    )  # fmt: skip


def _forward_of(node: fx.Node) -> fx.Node:
    if node.target is FORWARD:
        return node
    return next(
        candidate
        for candidate in node.graph.nodes
        if candidate.target is FORWARD and candidate.args[-1] == node.args[-1]
    )


def _pins_of_tensors(
    part: ManualPart,
    name: str,
    hints: Sequence[Hint | Partial],
    shapes: Sequence[Sequence[int]],
    mesh: Mapping[str, int],
) -> list[tuple[AxisPlacement, ...]]:
    return [
        _pins(hint, len(shape), mesh, part.line, f"{name}[{number}] of {part.name}")
        for number, (hint, shape) in enumerate(zip(hints, shapes, strict=True))
    ]


def _pins(
    hint: Hint | Partial, num_dims: int, mesh: Mapping[str, int], line: str, name: str
) -> tuple[AxisPlacement, ...]:
    if not isinstance(hint, Partial):
        pins = pin_of(hint, num_dims, mesh, line, name)
        return tuple(WHOLE if pin is None else pin for pin in pins)
    if hint.axis not in mesh:
        rule = f"must name an axis of the mesh (={', '.join(mesh)})"
        raise spec_error("not_a_choice", f"{line} ({name})", hint.axis, rule, "use one of these")
    cuts = [WHOLE if pin is None else pin for pin in pin_of(Shard(hint.dims), num_dims, mesh, line, name)]
    return tuple(partial(hint.combine) if axis == hint.axis else cut for axis, cut in zip(mesh, cuts, strict=True))


def _option(
    axis: int, in_placements: Sequence[AxisPlacement], out_placements: Sequence[AxisPlacement], is_backward: bool
) -> AxisOption:
    name = f"manual {axis}"
    if not is_backward:
        return AxisOption(name, tuple(in_placements), tuple(out_placements))
    # every rank has the whole gradient of a partial result
    gradient_placements = tuple(WHOLE if placement.combine is not None else placement for placement in out_placements)
    adds = any(placement != WHOLE for placement in out_placements)
    argument_gradients = tuple(partial() if placement == WHOLE and adds else placement for placement in in_placements)
    return AxisOption(name, (*in_placements, *gradient_placements), argument_gradients)


def _check_even(part: ManualPart, shapes: Any, pins: Any, mesh: Mapping[str, int]) -> None:
    for shape, placements in zip(shapes, pins, strict=True):
        for dim, size in enumerate(shape):
            ways = 1
            for placement, degree in zip(placements, mesh.values(), strict=True):
                ways *= degree if placement.dim == dim else 1
            if size % ways:
                rule = f"must be divisible by the number of ranks that split dimension {dim} of {list(shape)} (={ways})"
                raise spec_error("not_divisible", part.line, size, rule, "change the size or the mesh")


def attribute_of(name: str) -> str:
    """Name of the attribute of a program's module that holds a manual part."""
    return f"manual_{name.rpartition('.')[2]}"


def _run(local: LocalCall) -> fx.Node:
    name = str(local.node.args[-1])
    part = local.attribute(attribute_of(name))
    if local.node.target is FORWARD:
        return local.call(_parts_of, part, local.parts)
    count = len(local.node.args[0])  # type: ignore[arg-type]
    return local.call(_gradients_of, part, local.parts[:count], local.parts[count:])


def _parts_of(part: ManualPart, tensors: Sequence[Any]) -> list[Any]:
    return part([tensor.detach() for tensor in tensors])


def _gradients_of(part: ManualPart, tensors: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    return part.gradients(tensors, gradients)
