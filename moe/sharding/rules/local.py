"""One operator on a rank's parts, while its local form is written."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.nn import functional

from moe.sharding.operands import operands, replace_operands, results
from moe.sharding.placement import part_shape
from moe.sharding.rules.rule import Factor, Options, Rule, operand_placements, result_placements


class LocalProgramWriter(Protocol):
    """A local program while it is written."""

    degrees: tuple[int, ...]
    mesh: fx.Node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node: ...

    def first(self, size: int, axes: tuple[int, ...]) -> fx.Node | int: ...

    def attribute(self, name: str) -> fx.Node: ...

    def valid(self, size: int, axes: tuple[int, ...]) -> fx.Node | int: ...

    def mask_padding(
        self, part: fx.Node, dim: int, size: int, axes: tuple[int, ...], value: float | int | bool
    ) -> fx.Node: ...


class LocalCall:
    """The facts that a rule's lowering needs, and the means to write local operators."""

    def __init__(
        self, node: fx.Node, rule: Rule, options: Options, parts: Sequence[fx.Node], writer: LocalProgramWriter
    ) -> None:
        self.node, self.rule, self.options = node, rule, options
        self.parts = list(parts)
        """The rank's parts of the operands, padded and masked."""
        self._writer, self.degrees = writer, writer.degrees
        self.is_kept = False
        """Whether the operator should save further tensors for its gradients."""
        self.saved_parts: list[fx.Node] = []
        """For the gradients of an operator, the tensors that the operator has saved with `keep`."""

    def keep(self, values: Sequence[fx.Node]) -> None:
        """Save tensors of any shapes for the operator's gradients."""
        self.saved_parts = list(values)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Write a call of an operator or function."""
        return self._writer.call(target, *args, **kwargs)

    def attribute(self, name: str) -> fx.Node:
        """Something that the program has with it, by its name."""
        return self._writer.attribute(name)

    def runtime(self, function: Any, *args: Any) -> fx.Node:
        """Write a call of a function whose first argument is the mesh."""
        return self._writer.call(function, self._writer.mesh, *args)

    def default(self, target: Any = None) -> fx.Node:
        """Write the operator itself, or another one with the same arguments, on the parts."""
        args, kwargs = self.arguments()
        return self.call(target or self.node.target, *args, **kwargs)

    def contiguous(self) -> fx.Node:
        """Write the operator itself, on contiguous operands, for kernels that read them in the order of memory."""
        self.parts = [self.call(torch.ops.aten.contiguous.default, part) for part in self.parts]
        return self.default()

    def in_rows(self) -> fx.Node:
        """Write the operator itself, on operands with contiguous rows, for kernels that read rows."""
        self.parts = [self.call(rows_in_order, part) for part in self.parts]
        return self.default()

    def call_in_captured_order(self) -> fx.Node:
        """Write the operator itself, on operands with the memory order that they had in capture, on which its results
        or its gradients depend."""
        parts = []
        for operand, part in zip(operands(self.node), self.parts, strict=False):
            value = operand.meta["val"]
            strides = value.stride()
            order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
            parts.append(self.call(in_order, part, order, value.is_contiguous()))
        self.parts = parts
        return self.default()

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The operator's arguments, with the parts in place of its operands."""
        num_parts = len(self.parts)  # saved tensors are not among the operands
        return replace_operands(self.node, lambda number, _: self.parts[number] if number < num_parts else None)

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """Unsharded shape."""
        return tuple(operands(self.node)[operand].meta["val"].shape)

    def result_shape(self, result: int = 0) -> tuple[int, ...]:
        """Unsharded shape."""
        return tuple(results(self.node)[result].shape)

    def part_shape(self, result: int = 0) -> tuple[int, ...]:
        """Padded shape of the rank's part of a result."""
        return part_shape(self.result_shape(result), result_placements(self.options, result), self.degrees)

    def operand_part_shape(self, operand: int) -> tuple[int, ...]:
        """Padded shape of the rank's part of an operand."""
        return part_shape(self.operand_shape(operand), operand_placements(self.options, operand), self.degrees)

    def axes(self, factor: Factor) -> tuple[int, ...]:
        """Mesh axes that split a factor, outermost first."""
        return tuple(axis for axis, option in enumerate(self.options) if option.factor == factor)

    def size(self, factor: Factor) -> int:
        """Padded length of the rank's part of a factor."""
        size = self.rule.sizes[factor]
        for axis in self.axes(factor):
            size = -(-size // self.degrees[axis])
        return size

    def first(self, factor: Factor) -> fx.Node | int:
        """First position of the rank's part of a factor, which the program computes."""
        return self._writer.first(self.rule.sizes[factor], self.axes(factor))

    def valid(self, factor: Factor) -> fx.Node | int:
        """Length of the rank's part of a factor without padding, which the program computes."""
        return self._writer.valid(self.rule.sizes[factor], self.axes(factor))

    def mask_padding(self, part: fx.Node, dim: int, size: int, axes: Sequence[int], value: float) -> fx.Node:
        """The part of a dimension of this size, split over these axes, with padding replaced."""
        return self._writer.mask_padding(part, dim, size, tuple(axes), value)


def rows_in_order(part: Tensor) -> Tensor:
    """The part, copied if its rows are not contiguous."""
    return part if part.dim() == 0 or part.stride(-1) == 1 else part.contiguous()


def in_order(part: Tensor, order: Sequence[int], is_contiguous: bool) -> Tensor:
    """The part with the memory order `order` of dimensions, outermost first; contiguous if `is_contiguous`."""
    ordered_part = part.permute(list(order)).contiguous()
    if not is_contiguous and list(order) == list(range(len(order))):
        ordered_part = functional.pad(ordered_part, (0, 1))[..., :-1]
    return ordered_part.permute(sorted(range(len(order)), key=order.__getitem__))
